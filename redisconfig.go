// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
)

// RedisConfig says how to reach Redis. Placeholders `{env.*}` and `{file.*}` are
// replaced in every text.
type RedisConfig struct {
	// Addresses: `host:port`, or a `redis://`, `rediss://` or `unix://` URL.
	// Several are the seeds of a Cluster, or Sentinels if `master_name` is set.
	Addresses []string `json:"addresses,omitempty"`

	// The ACL user (default: Redis's default user).
	Username string `json:"username,omitempty"`

	// The password.
	Password string `json:"password,omitempty"`

	// The number of the database (default 0).
	DB int `json:"db,omitempty"`

	// Whether Redis is a Cluster; implied by several addresses without
	// `master_name`.
	Cluster bool `json:"cluster,omitempty"`

	// The name of the master that Sentinels watch; the addresses are theirs.
	MasterName string `json:"master_name,omitempty"`

	// The ACL user of the Sentinels.
	SentinelUsername string `json:"sentinel_username,omitempty"`

	// The password of the Sentinels.
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// TLS; an empty object means TLS with the system's CAs.
	TLS *RedisTLS `json:"tls,omitempty"`

	// How long one request may wait for the store, all in all (default 50ms).
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// What every key starts with; no braces (default `stripe_ratelimit:`).
	KeyPrefix string `json:"key_prefix,omitempty"`

	// The largest number of connections for each Redis node (default: 10 for
	// each CPU).
	PoolSize int `json:"pool_size,omitempty"`
}

// RedisTLS is how the connections to Redis are secured.
type RedisTLS struct {
	// A PEM file of the certificate authorities to trust (default: the system's).
	CA string `json:"ca,omitempty"`

	// A PEM file of the client's certificate.
	Cert string `json:"cert,omitempty"`

	// A PEM file of the client certificate's key.
	Key string `json:"key,omitempty"`

	// The name that the server's certificate must have (default: the host of
	// the address).
	ServerName string `json:"server_name,omitempty"`

	// Do not verify the server's certificate. For tests only.
	InsecureSkipVerify bool `json:"insecure_skip_verify,omitempty"`
}

// expanded returns the config with placeholders replaced and URLs taken apart,
// or nil if it has no address.
func (rc *RedisConfig) expanded() (*RedisConfig, error) {
	if rc == nil {
		return nil, nil
	}
	c := *rc
	c.Addresses = nil
	for _, address := range rc.Addresses {
		if address == "" {
			continue
		}
		text, err := expand(address)
		if err != nil {
			return nil, fmt.Errorf("redis address: %w", err)
		}
		c.Addresses = append(c.Addresses, text)
	}
	if len(c.Addresses) == 0 {
		return nil, nil
	}
	var errs []error
	texts := map[string]*string{
		"username": &c.Username, "password": &c.Password, "master_name": &c.MasterName,
		"sentinel_username": &c.SentinelUsername, "sentinel_password": &c.SentinelPassword,
		"key_prefix": &c.KeyPrefix,
	}
	if rc.TLS != nil {
		t := *rc.TLS
		c.TLS = &t
		texts["tls ca"], texts["tls cert"], texts["tls key"], texts["tls server_name"] = &t.CA, &t.Cert, &t.Key, &t.ServerName
	}
	for name, text := range texts {
		var err error
		if *text, err = expand(*text); err != nil {
			errs = append(errs, fmt.Errorf("redis %s: %w", name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &c, c.validate()
}

// universal returns the options of go-redis for an expanded config.
func (rc *RedisConfig) universal() (*redis.UniversalOptions, error) {
	u := &redis.UniversalOptions{
		Username:         rc.Username,
		Password:         rc.Password,
		DB:               rc.DB,
		MasterName:       rc.MasterName,
		SentinelUsername: rc.SentinelUsername,
		SentinelPassword: rc.SentinelPassword,
		PoolSize:         rc.PoolSize,
		IsClusterMode:    rc.Cluster,
	}
	secure := rc.TLS != nil
	for _, text := range rc.Addresses {
		address, err := parseRedisAddress(text)
		if err != nil {
			return nil, err
		}
		u.Addrs = append(u.Addrs, address.addr)
		if address.username != "" {
			u.Username = address.username
		}
		if address.password != "" {
			u.Password = address.password
		}
		if address.db != nil {
			u.DB = *address.db
		}
		secure = secure || address.scheme == "rediss"
	}
	if !secure {
		return u, nil
	}
	var err error
	u.TLSConfig, err = rc.TLS.config()
	return u, err
}

// key is equal for equal connections. Files count by what they contain: after a
// certificate was renewed, a reload makes new connections with it.
func (rc *RedisConfig) key() (string, error) {
	text, err := json.Marshal(rc)
	if err != nil || rc.TLS == nil {
		return string(text), err
	}
	hash := sha256.New()
	for _, file := range []string{rc.TLS.CA, rc.TLS.Cert, rc.TLS.Key} {
		if file == "" {
			continue
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("redis tls: %w", err)
		}
		hash.Write(content)
	}
	return fmt.Sprintf("%s %x", text, hash.Sum(nil)), nil
}

// config returns the TLS configuration; that of a nil RedisTLS trusts the
// system's certificate authorities.
func (t *RedisTLS) config() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if t == nil {
		return config, nil
	}
	config.ServerName = t.ServerName
	config.InsecureSkipVerify = t.InsecureSkipVerify
	if t.CA != "" {
		pem, err := os.ReadFile(t.CA)
		if err != nil {
			return nil, fmt.Errorf("redis tls ca: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("redis tls ca: %s has no PEM certificate", t.CA)
		}
	}
	if t.Cert != "" {
		cert, err := tls.LoadX509KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, fmt.Errorf("redis tls cert: %w", err)
		}
		config.Certificates = []tls.Certificate{cert}
	}
	return config, nil
}
