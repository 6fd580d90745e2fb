// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import "github.com/caddyserver/caddy/v2"

// App holds what all stripe_ratelimit handlers of a config share: the store and
// the secret that identities are hashed with.
type App struct {
	// The Redis that the instances of a fleet share. Without it, or with only
	// empty addresses, each process limits by its own memory.
	Redis *RedisConfig `json:"redis,omitempty"`

	// The HMAC key that identities are hashed with, the same on every instance.
	// Placeholders `{env.*}` and `{file.*}` are replaced. Without it identities
	// are hashed with a random key of the process (memory store) or with a
	// fixed, publicly known key (Redis), which is warned about.
	KeySecret string `json:"key_secret,omitempty"`

	// What happens to requests when the store fails: `open` lets them pass
	// (default `open`).
	OnStoreError string `json:"on_store_error,omitempty"`
}

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
