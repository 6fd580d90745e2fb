// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
)

// runUpstream is a server that costs next to nothing: it looks at the first line
// of a request and for the end of it, and knows no bodies.
func runUpstream(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			serveUpstream(c)
		}()
	}
}

var upstreamReply = []byte("HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 2\r\n\r\nok")

func serveUpstream(c net.Conn) {
	r := bufio.NewReader(c)
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return
		}
		reply := upstreamReply
		if bytes.HasPrefix(line, []byte("GET "+usagePath)) {
			body, _ := json.Marshal(ownUsage()) // three numbers
			reply = fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		}
		for len(bytes.TrimSpace(line)) > 0 {
			if line, err = r.ReadSlice('\n'); err != nil {
				return
			}
		}
		if _, err := c.Write(reply); err != nil {
			return
		}
	}
}
