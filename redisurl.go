// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// redisAddress is what one address of a RedisConfig says.
type redisAddress struct {
	network  string // tcp or unix
	addr     string // host:port, or the path of the socket
	scheme   string // redis, rediss, unix; empty for host:port
	username string
	password string
	db       *int
}

// parseRedisAddress takes an address apart: host:port, or a redis://, rediss://
// or unix:// URL. Its errors never quote a URL, which may hold a password.
func parseRedisAddress(s string) (redisAddress, error) {
	if !strings.Contains(s, "://") {
		if strings.Contains(s, "@") { // likely user:password@host
			return redisAddress{}, errors.New("redis address is not host:port; an address with a password starts with redis:// or rediss://")
		}
		if _, port, err := net.SplitHostPort(s); err != nil || !isPort(port) {
			return redisAddress{}, fmt.Errorf("redis address '%s' is not host:port, such as localhost:6379, or a redis://, rediss:// or unix:// URL", s)
		}
		return redisAddress{network: "tcp", addr: s}, nil
	}

	u, err := url.Parse(s)
	if err != nil {
		return redisAddress{}, errors.New("redis address is not a valid URL; put a password with special characters into the password subdirective")
	}
	a := redisAddress{network: "tcp", scheme: u.Scheme, username: u.User.Username()}
	a.password, _ = u.User.Password()
	db := strings.TrimPrefix(u.Path, "/")
	switch u.Scheme {
	case "redis", "rediss":
		host, port := u.Hostname(), u.Port()
		if host == "" {
			host = "localhost"
		}
		if port == "" {
			port = "6379"
		}
		if !isPort(port) {
			return redisAddress{}, errors.New("redis address has a port that is not between 1 and 65535")
		}
		a.addr = net.JoinHostPort(host, port)
	case "unix":
		if u.Host != "" || u.Path == "" {
			return redisAddress{}, errors.New("redis address has no absolute path; write unix:///run/redis/redis.sock")
		}
		a.network, a.addr, db = "unix", u.Path, ""
	default:
		return redisAddress{}, errors.New("redis address is a URL that does not start with redis://, rediss:// or unix://")
	}
	query := u.Query()
	if db == "" {
		db = query.Get("db")
		query.Del("db")
	}
	if len(query) > 0 || u.Fragment != "" {
		return redisAddress{}, errors.New("redis address has URL parameters; of these only db is understood, the rest are subdirectives")
	}
	if db != "" {
		n, err := strconv.Atoi(db)
		if err != nil || n < 0 {
			return redisAddress{}, errors.New("redis address has a database that is not a number, such as redis://localhost:6379/1")
		}
		a.db = &n
	}
	return a, nil
}

func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0
}

// placeholderRE matches the placeholders that are replaced when the
// configuration is loaded, not when it is adapted.
var placeholderRE = regexp.MustCompile(`\{(env|file)\.[^{}]*\}`)

// validate reports the first contradiction in the configuration. Texts that
// still have placeholders are left out: it is called again once they are
// replaced.
func (rc *RedisConfig) validate() error {
	cluster := rc.Cluster || len(rc.Addresses) > 1 && rc.MasterName == ""
	switch {
	case rc.DB < 0 || rc.Timeout < 0 || rc.PoolSize < 0:
		return errors.New("redis has a db, timeout or pool_size below 0")
	case rc.Cluster && rc.MasterName != "":
		return errors.New("redis has both cluster and master_name; master_name is for Sentinel, which is no Cluster")
	case rc.MasterName == "" && (rc.SentinelUsername != "" || rc.SentinelPassword != ""):
		return errors.New("redis has sentinel credentials but no master_name")
	case cluster && rc.DB != 0:
		return fmt.Errorf("redis has db %d, but a Cluster has only database 0 (several addresses without master_name are a Cluster)", rc.DB)
	case rc.TLS != nil && (rc.TLS.Cert == "") != (rc.TLS.Key == ""):
		return errors.New("redis tls has a client certificate without its key, or a key without certificate; write cert <file> <key>")
	case strings.ContainsAny(placeholderRE.ReplaceAllString(rc.KeyPrefix, ""), "{}"):
		return fmt.Errorf("redis key_prefix '%s' has braces, which would change the slot of every key in a Cluster; leave them out", rc.KeyPrefix)
	}
	var secure, plain int
	for _, s := range rc.Addresses {
		if s == "" || placeholderRE.MatchString(s) {
			continue
		}
		a, err := parseRedisAddress(s)
		if err != nil {
			return err
		}
		if err := rc.validateURL(a, cluster); err != nil {
			return err
		}
		if a.scheme == "rediss" {
			secure++
		} else {
			plain++
		}
	}
	if secure > 0 && plain > 0 {
		return errors.New("redis addresses are in part rediss://; write all of them as rediss://, or all as host:port with tls")
	}
	return nil
}

// validateURL checks that a URL and the subdirectives neither contradict nor
// repeat each other: whichever won would surprise somebody.
func (rc *RedisConfig) validateURL(a redisAddress, cluster bool) error {
	says := a.username != "" || a.password != "" || a.db != nil
	switch {
	case says && len(rc.Addresses) > 1:
		return errors.New("redis has several addresses, one of which says a username, password or database; write username, password and db as subdirectives")
	case says && rc.MasterName != "":
		return errors.New("redis address of a Sentinel says a username, password or database; write sentinel_username and sentinel_password for the Sentinels, username, password and db for the master")
	case a.username != "" && rc.Username != "":
		return errors.New("redis username is given twice: in the URL and as a subdirective")
	case a.password != "" && rc.Password != "":
		return errors.New("redis password is given twice: in the URL and as a subdirective")
	case a.db != nil && rc.DB != 0:
		return errors.New("redis db is given twice: in the URL and as a subdirective")
	case a.db != nil && *a.db != 0 && cluster:
		return errors.New("redis URL names a database, but a Cluster has only database 0")
	case rc.TLS == nil:
		return nil
	case a.scheme == "rediss" && *rc.TLS == RedisTLS{}:
		return errors.New("redis tls is given twice: by rediss:// and as a subdirective; leave tls out unless it has options")
	case a.scheme == "redis":
		return errors.New("redis:// means no TLS, but there is tls; write rediss:// or host:port")
	case a.scheme == "unix":
		return errors.New("redis over a unix socket has no TLS; leave tls out")
	}
	return nil
}

// validateConfig reports the first mistake in what the configuration says by
// itself, before placeholders are replaced.
func (a *App) validateConfig() error {
	if a.Redis != nil {
		if err := a.Redis.validate(); err != nil {
			return err
		}
	}
	return validateWord("on_store_error", a.OnStoreError, storeErrorWords)
}
