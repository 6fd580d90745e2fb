// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// StartUnix starts a redis-server that listens on a Unix socket alone.
func StartUnix(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServer(t)
	// Not t.TempDir: the path of a socket has room for about 100 bytes.
	dir, err := os.MkdirTemp("", "redis")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s.Addr = filepath.Join(dir, "redis.sock")
	if err := s.start(dir, append([]string{"--port", "0", "--unixsocket", s.Addr}, args...)...); err != nil {
		t.Fatalf("start redis-server: %v\n%s", err, s.log)
	}
	return s
}

// StartTLS starts a redis-server that speaks TLS alone and wants a certificate
// of its clients. CAFile, CertFile and KeyFile are what they need.
func StartTLS(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServer(t)
	dir := t.TempDir()
	ca := newAuthority(t)
	s.CAFile = writePEM(t, filepath.Join(dir, "ca.pem"), "CERTIFICATE", ca.cert.Raw)
	serverCert, serverKey := ca.issue(t, filepath.Join(dir, "server"), x509.ExtKeyUsageServerAuth)
	s.CertFile, s.KeyFile = ca.issue(t, filepath.Join(dir, "client"), x509.ExtKeyUsageClientAuth)

	pair, err := tls.LoadX509KeyPair(s.CertFile, s.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	s.tls = &tls.Config{
		RootCAs:      x509.NewCertPool(),
		Certificates: []tls.Certificate{pair},
		MinVersion:   tls.VersionTLS12,
	}
	s.tls.RootCAs.AddCert(ca.cert)
	s.startOnFreePort("--tls-port", append([]string{
		"--port", "0", "--tls-auth-clients", "yes",
		"--tls-ca-cert-file", s.CAFile, "--tls-cert-file", serverCert, "--tls-key-file", serverKey,
	}, args...)...)
	return s
}

// AddUser adds an ACL user who may do nothing but what the rules say ("~app:*",
// "+evalsha").
func (s *Server) AddUser(name, password string, rules ...string) {
	s.t.Helper()
	command := []any{"ACL", "SETUSER", name, "reset", "on", ">" + password}
	for _, rule := range rules {
		command = append(command, rule)
	}
	s.do(command...)
}

// authority signs certificates for 127.0.0.1 and localhost, for a day.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "redistest CA"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

// issue writes a new certificate and its key to path.pem and path.key.
func (a *authority) issue(t testing.TB, path string, usage x509.ExtKeyUsage) (certFile, keyFile string) {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(int64(usage)),
		Subject:      pkix.Name{CommonName: "redistest " + filepath.Base(path)},
		NotBefore:    a.cert.NotBefore,
		NotAfter:     a.cert.NotAfter,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{usage},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		DNSNames:     []string{"localhost"},
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return writePEM(t, path+".pem", "CERTIFICATE", cert), writePEM(t, path+".key", "PRIVATE KEY", private)
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func writePEM(t testing.TB, path, kind string, der []byte) string {
	t.Helper()
	text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
