// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// The header blocks of all users' requests. Sensitive fields stay out of the
// dynamic table, so that a block is the same on every connection.
var requests2 = func() (all [][]byte) {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for user := range keyCount {
		b.Reset()
		for _, f := range []hpack.HeaderField{
			{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: "/"},
			{Name: ":authority", Value: "api.example.com", Sensitive: true},
			{Name: "user-agent", Value: "load", Sensitive: true},
			{Name: "authorization", Value: "Bearer " + apiKey(user), Sensitive: true},
		} {
			_ = e.WriteField(f) // to memory
		}
		all = append(all, bytes.Clone(b.Bytes()))
	}
	return all
}()

// window is how much a server may send before it hears of us again.
const window = 1 << 30

// conn2 is a client's connection of HTTP/2 without TLS, for one goroutine.
type conn2 struct {
	net.Conn
	r      *bufio.Reader
	w      *bufio.Writer
	framer *http2.Framer
	hpack  *hpack.Decoder

	next     uint32 // stream
	status   int    // of the header block that is being decoded
	received int    // bytes since the window was opened
	streams  map[uint32]*stream2
}

type stream2 struct {
	sent   time.Time
	status int
}

func dial2(addr string) (*conn2, error) {
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &conn2{Conn: nc, r: bufio.NewReader(nc), w: bufio.NewWriter(nc), next: 1, streams: map[uint32]*stream2{}}
	c.framer = http2.NewFramer(c.w, c.r)
	c.framer.SetReuseFrames()
	c.hpack = hpack.NewDecoder(4096, func(f hpack.HeaderField) {
		if f.Name == ":status" {
			c.status, _ = strconv.Atoi(f.Value)
		}
	})
	_, err = io.WriteString(c.w, http2.ClientPreface)
	if err == nil {
		err = c.framer.WriteSettings()
	}
	if err == nil {
		err = c.framer.WriteWindowUpdate(0, window)
	}
	return c, err
}

// send begins a user's request. It is on its way once receive waits.
func (c *conn2) send(user int) error {
	c.streams[c.next] = &stream2{sent: time.Now()}
	err := c.framer.WriteHeaders(http2.HeadersFrameParam{
		StreamID: c.next, BlockFragment: requests2[user], EndStream: true, EndHeaders: true,
	})
	c.next += 2
	return err
}

// receive reads a frame and returns the stream that it ends, or nil.
func (c *conn2) receive() (*stream2, error) {
	if c.r.Buffered() == 0 {
		if err := c.w.Flush(); err != nil {
			return nil, err
		}
	}
	frame, err := c.framer.ReadFrame()
	if err != nil {
		return nil, err
	}
	s := c.streams[frame.Header().StreamID]
	ended := false
	switch f := frame.(type) {
	case *http2.HeadersFrame:
		if _, err := c.hpack.Write(f.HeaderBlockFragment()); err != nil {
			return nil, err
		}
		if !f.HeadersEnded() || s == nil {
			return nil, fmt.Errorf("odd header frame: %v", f)
		}
		s.status, ended = c.status, f.StreamEnded()
	case *http2.DataFrame:
		c.received += int(f.Length)
		if c.received > window/2 {
			if err := c.framer.WriteWindowUpdate(0, uint32(c.received)); err != nil {
				return nil, err
			}
			c.received = 0
		}
		ended = f.StreamEnded()
	case *http2.SettingsFrame:
		if !f.IsAck() {
			return nil, c.framer.WriteSettingsAck()
		}
	case *http2.PingFrame:
		if !f.IsAck() {
			return nil, c.framer.WritePing(true, f.Data)
		}
	case *http2.GoAwayFrame, *http2.RSTStreamFrame:
		return nil, fmt.Errorf("the server gives up: %v", f)
	}
	if !ended || s == nil {
		return nil, nil
	}
	delete(c.streams, frame.Header().StreamID)
	return s, nil
}
