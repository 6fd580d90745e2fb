// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"errors"
	"math"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	if existing != nil {
		return nil, atStart(d, errors.New("global option 'stripe_ratelimit' is given twice; write all of it in one block"))
	}
	a := new(App)
	if err := a.UnmarshalCaddyfile(d); err != nil {
		return nil, err
	}
	return httpcaddyfile.App{Name: "stripe_ratelimit", Value: caddyconfig.JSON(a, nil)}, nil
}

// UnmarshalCaddyfile sets up the app from the tokens of the global option.
// Syntax:
//
//	stripe_ratelimit {
//		redis <address>... {
//			username          <name>
//			password          <secret>
//			db                <n>
//			cluster
//			master_name       <name>
//			sentinel_username <name>
//			sentinel_password <secret>
//			tls {
//				ca                   <file>
//				cert                 <file> <key file>
//				server_name          <name>
//				insecure_skip_verify
//			}
//			timeout           <duration>
//			key_prefix        <prefix>
//			pool_size         <n>
//		}
//		key_secret     <secret>
//		on_store_error open | local | closed
//	}
//
// An address is host:port or a redis://, rediss:// or unix:// URL; empty ones
// are left out, so that `redis {$REDIS_ADDR}` means this process's memory
// where the variable is not set. Texts may hold {env.*} and {file.*}. tls may
// stand without a block. The fields of App tell meanings and defaults.
func (a *App) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the option's name
	args, err := options{
		"redis":          a.unmarshalRedis,
		"key_secret":     readText(&a.KeySecret),
		"on_store_error": readWord(&a.OnStoreError, storeErrorWords),
	}.read(d, false)
	if err != nil {
		return err
	}
	if len(args) > 0 {
		return atStart(d, errors.New("the global option takes no arguments; write its options in a block, one a line"))
	}
	return nil
}

func (a *App) unmarshalRedis(d *caddyfile.Dispenser) error {
	rc := new(RedisConfig)
	a.Redis = rc
	args, err := options{
		"username":          readText(&rc.Username),
		"password":          readText(&rc.Password),
		"db":                readNumber(&rc.DB, 0, math.MaxInt32),
		"cluster":           readFlag(&rc.Cluster),
		"master_name":       readText(&rc.MasterName),
		"sentinel_username": readText(&rc.SentinelUsername),
		"sentinel_password": readText(&rc.SentinelPassword),
		"tls":               rc.unmarshalTLS,
		"timeout":           readDuration(&rc.Timeout),
		"key_prefix":        readText(&rc.KeyPrefix),
		"pool_size":         readNumber(&rc.PoolSize, 1, math.MaxInt32),
	}.read(d, false)
	if err != nil {
		return err
	}
	for _, address := range args {
		if address != "" {
			rc.Addresses = append(rc.Addresses, address)
		}
	}
	return atStart(d, rc.validate())
}

func (rc *RedisConfig) unmarshalTLS(d *caddyfile.Dispenser) error {
	rc.TLS = new(RedisTLS)
	args, err := options{
		"ca":                   readText(&rc.TLS.CA),
		"cert":                 readText(&rc.TLS.Cert, &rc.TLS.Key),
		"server_name":          readText(&rc.TLS.ServerName),
		"insecure_skip_verify": readFlag(&rc.TLS.InsecureSkipVerify),
	}.read(d, false)
	if err != nil {
		return err
	}
	if len(args) > 0 {
		return atStart(d, errors.New("'tls' takes no arguments; write its options in a block, one a line"))
	}
	return nil
}

var _ caddyfile.Unmarshaler = (*App)(nil)
