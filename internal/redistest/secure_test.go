// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestStartUnix(t *testing.T) {
	s := StartUnix(t)
	if err := s.Client().Ping(t.Context()).Err(); err != nil {
		t.Errorf("PING: %v", err)
	}
	s.Restart()
	if err := s.Client().Ping(t.Context()).Err(); err != nil {
		t.Errorf("PING after Restart: %v", err)
	}
	if got := s.Commands(t)["ping"]; got != 1 {
		t.Errorf("Commands: got %d pings, want 1", got)
	}
}

func TestStartTLS(t *testing.T) {
	s := StartTLS(t)
	if err := s.Client().Ping(t.Context()).Err(); err != nil {
		t.Errorf("PING: %v", err)
	}

	// The files are enough to connect, and all of them are needed.
	pem, err := os.ReadFile(s.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		t.Fatalf("%s holds no certificate", s.CAFile)
	}
	pair, err := tls.LoadX509KeyPair(s.CertFile, s.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name   string
		config *tls.Config
		ok     bool
	}{
		{"all", &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}, true},
		{"no client certificate", &tls.Config{RootCAs: roots}, false},
		{"system's CAs", &tls.Config{Certificates: []tls.Certificate{pair}}, false},
		{"no TLS", nil, false},
	}
	for _, c := range cases {
		rdb := redis.NewClient(&redis.Options{
			Addr: s.Addr, TLSConfig: c.config, MaxRetries: -1, DialerRetries: 1,
		})
		if err := rdb.Ping(t.Context()).Err(); (err == nil) != c.ok {
			t.Errorf("%s: PING: got %v, want success %v", c.name, err, c.ok)
		}
		_ = rdb.Close()
	}
}

func TestServer_AddUser(t *testing.T) {
	s := Start(t)
	s.AddUser("limiter", "secret", "~app:*", "+get", "+set")
	opts := *s.Client().Options()
	opts.Username, opts.Password = "limiter", "secret"
	rdb := redis.NewClient(&opts)
	defer rdb.Close()
	if err := rdb.Set(t.Context(), "app:k", "v", 0).Err(); err != nil {
		t.Errorf("SET app:k: %v", err)
	}
	if err := rdb.Set(t.Context(), "other", "v", 0).Err(); !redis.HasErrorPrefix(err, "NOPERM") {
		t.Errorf("SET other: got %v, want NOPERM", err)
	}
	if err := rdb.Del(t.Context(), "app:k").Err(); !redis.HasErrorPrefix(err, "NOPERM") {
		t.Errorf("DEL app:k: got %v, want NOPERM", err)
	}
}
