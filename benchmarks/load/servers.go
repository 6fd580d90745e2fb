// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/benchmarks/redisproc"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// process is one that this program runs: itself, in another role.
type process struct {
	name string
	cmd  *exec.Cmd
	log  bytes.Buffer // to be read once done is closed
	done chan struct{}
}

func startProcess(name, dir string, args ...string) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{name: name, cmd: exec.Command(self, args...), done: make(chan struct{})}
	p.cmd.Dir = dir
	p.cmd.Env = append(os.Environ(), roleEnv+"="+name,
		"XDG_DATA_HOME="+filepath.Join(dir, "data"), "XDG_CONFIG_HOME="+filepath.Join(dir, "config"))
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	redistest.TieToParent(p.cmd)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(5 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// await returns once ready does not fail.
func (p *process) await(ready func() error) error {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended:\n%s", p.name, &p.log)
		default:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s does not start: %w", p.name, err)
		}
	}
}

// upstream answers for what is behind reverse_proxy.
type upstream struct {
	*process
	addr string
}

func startUpstream() (*upstream, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	p, err := startProcess(upstreamRole, "", addr)
	if err != nil {
		return nil, err
	}
	u := &upstream{p, addr}
	if err := p.await(func() error { _, err := u.usage(); return err }); err != nil {
		p.stop()
		return nil, err
	}
	return u, nil
}

func (u *upstream) usage() (usage, error) { return getUsage("http://" + u.addr + usagePath) }

// server is the Caddy of a setup, with its Redis.
type server struct {
	*process
	setup
	admin string
	sites map[string]string // by answer: host:port

	redis     *redis.Client // or nil
	redisAddr string
	stopRedis func()
}

// startServer starts the Caddy of a setup. The denial is a file for flood-bare.
func startServer(s setup, dir, upstream, denial string) (_ *server, err error) {
	srv := &server{setup: s, stopRedis: func() {}}
	defer func() {
		if err != nil {
			srv.stop()
		}
	}()
	if s.redis {
		if srv.redisAddr, srv.stopRedis, err = redisproc.Start(); err != nil {
			return nil, err
		}
		srv.redis = redis.NewClient(&redis.Options{Addr: srv.redisAddr, Protocol: 2, DisableIdentity: true})
	}
	var addrs [3]string
	var ports [3]int
	for i := range addrs {
		if addrs[i], err = freeAddr(); err != nil {
			return nil, err
		}
		_, port, _ := strings.Cut(addrs[i], ":")
		fmt.Sscan(port, &ports[i])
	}
	srv.admin = addrs[0]
	srv.sites = map[string]string{"respond": addrs[1], "proxy": addrs[2]}
	dir = filepath.Join(dir, s.name)
	if err = os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "Caddyfile")
	text := s.caddyfile(srv.admin, ports[1], ports[2], upstream, srv.redisAddr, denial)
	if err = os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	if srv.process, err = startProcess(caddyRole, dir, "run", "--config", file, "--adapter", "caddyfile"); err != nil {
		return nil, err
	}
	return srv, srv.await(func() error {
		for _, addr := range srv.sites {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				return err
			}
			_ = c.Close()
		}
		_, err := srv.usage()
		return err
	})
}

func (s *server) stop() {
	if s.process != nil {
		s.process.stop()
	}
	if s.redis != nil {
		_ = s.redis.Close()
	}
	s.stopRedis()
}

func (s *server) usage() (usage, error) { return getUsage("http://" + s.admin + usagePath) }

var apiClient = &http.Client{Timeout: patience}

func getUsage(url string) (u usage, err error) {
	resp, err := apiClient.Get(url)
	if err != nil {
		return u, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return u, errors.New(resp.Status)
	}
	return u, json.NewDecoder(resp.Body).Decode(&u)
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// saveDenial asks a server as one user until it denies, and writes the response
// to a file for load_respond.
func saveDenial(ctx context.Context, addr, file string) error {
	for ctx.Err() == nil {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/", nil)
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+apiKey(0))
		resp, err := apiClient.Do(req)
		if err != nil {
			return err
		}
		var body bytes.Buffer
		_, err = body.ReadFrom(resp.Body)
		_ = resp.Body.Close()
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusTooManyRequests {
			continue
		}
		header := resp.Header
		for _, theirs := range []string{"Date", "Server", "Content-Length"} { // Caddy's own
			header.Del(theirs)
		}
		header.Set("Request-Id", "{http.request.uuid}")
		text, err := json.Marshal(map[string]any{"status_code": resp.StatusCode, "headers": header, "body": body.String()})
		if err != nil {
			return err
		}
		return os.WriteFile(file, text, 0o600)
	}
	return ctx.Err()
}
