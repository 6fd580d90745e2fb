// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"net"
	"strconv"
	"sync"
	"testing"
	"time"
)

// Proxy stands between a client and a server (of any protocol) and plays the
// faults of the network between them.
type Proxy struct {
	// Addr is the host:port where it listens.
	Addr string

	t  testing.TB
	to string
	wg sync.WaitGroup

	mu        sync.Mutex   // guards below
	listener  net.Listener // nil while connections are refused
	links     map[*link]struct{}
	accepted  int
	cut       int // replies that are still to be cut
	cutEvery  int // this many replies, one is cut; 0: none
	replies   int // since cutEvery was set
	delay     time.Duration
	blackhole bool
}

// link is one client's connection together with the one to the server.
type link struct {
	client, server net.Conn
	lossy          bool // bytes were dropped, so what follows makes no sense
	stranded       bool // and it is not even closed
}

func (l *link) close() {
	_ = l.client.Close()
	_ = l.server.Close()
}

// StartProxy starts a proxy to addr, a host:port. It ends with the test.
func StartProxy(t testing.TB, addr string) *Proxy {
	t.Helper()
	p := &Proxy{
		Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(FreePort(t))),
		t:    t, to: addr, links: make(map[*link]struct{}),
	}
	p.Refuse(false)
	t.Cleanup(func() {
		p.Refuse(true)
		p.CloseAll()
		p.wg.Wait()
	})
	return p
}

// CutReplies makes the next n replies vanish and closes the connections they
// were for: the server has done its work, and the client will never know. All
// that the server sends in one go counts as one reply, whoever asked for it (so
// does the reply to the HELLO of a new connection).
func (p *Proxy) CutReplies(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = n
}

// CutEvery is CutReplies(1) for each nth reply from now on; 0 ends it.
func (p *Proxy) CutEvery(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutEvery, p.replies = n, 0
}

// Delay makes each reply come so much later, until it is set to 0.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Blackhole makes all bytes vanish while it is on; connections stay open and
// new ones are accepted. Turned off, it closes the connections that lost bytes.
func (p *Proxy) Blackhole(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blackhole = on
	for l := range p.links {
		if !on && l.lossy && !l.stranded {
			l.close()
		}
	}
}

// Strand makes the connections that exist lead nowhere from now on, as when a
// firewall has forgotten them: bytes vanish and neither side hears of it. New
// connections are good.
func (p *Proxy) Strand() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.stranded = true
	}
}

// Refuse makes the system refuse new connections while it is on. Those that
// exist live on; see CloseAll.
func (p *Proxy) Refuse(on bool) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case on && p.listener != nil:
		_ = p.listener.Close()
		p.listener = nil
	case !on && p.listener == nil:
		l, err := net.Listen("tcp", p.Addr)
		if err != nil {
			p.t.Fatalf("proxy: %v", err)
		}
		p.listener = l
		p.wg.Go(func() { p.accept(l) })
	}
}

// CloseAll closes all connections.
func (p *Proxy) CloseAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.close()
	}
}

// Open returns the number of connections that are open now.
func (p *Proxy) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Accepted returns the number of connections since the start.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

// serve carries bytes both ways until either side ends.
func (p *Proxy) serve(client net.Conn) {
	server, err := net.DialTimeout("tcp", p.to, readyTimeout)
	if err != nil {
		_ = client.Close()
		return
	}
	l := &link{client: client, server: server}
	p.mu.Lock()
	refused := p.listener == nil
	if !refused {
		p.accepted++
		p.links[l] = struct{}{}
	}
	p.mu.Unlock()
	if !refused {
		p.wg.Go(func() { p.carry(l, client, server) })
		p.carry(l, server, client)
	}
	l.close()
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// carry copies bytes until either side ends, then ends both.
func (p *Proxy) carry(l *link, from, to net.Conn) {
	defer l.close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		pass, cut, delay := p.fate(l, from == l.server)
		if cut {
			return
		}
		time.Sleep(delay)
		if !pass {
			continue
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// fate decides what becomes of bytes that were read.
func (p *Proxy) fate(l *link, reply bool) (pass, cut bool, delay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if reply {
		p.replies++
		delay = p.delay
	}
	switch {
	case reply && p.cutEvery > 0 && p.replies%p.cutEvery == 0:
		return false, true, 0
	case reply && p.cut > 0:
		p.cut--
		return false, true, 0
	case p.blackhole || l.stranded:
		l.lossy = true
		return false, false, 0
	}
	// After a hole in the stream nothing may pass, or a reply would be taken
	// for that to another command. Blackhole(false) closes such a link.
	return !l.lossy, false, delay
}
