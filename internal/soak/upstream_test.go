// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// newUpstream starts the API behind the Caddys and returns its host:port.
func newUpstream(t *testing.T) string {
	server := httptest.NewServer(http.HandlerFunc(upstream))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return strings.TrimPrefix(server.URL, "http://")
}

func upstream(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	switch r.URL.Path {
	case "/slow":
		select {
		case <-time.After(50 * time.Millisecond):
		case <-r.Context().Done():
		}
	case "/events": // tells the time, until its client has had enough
		w.Header().Set("Content-Type", "text/event-stream")
		for r.Context().Err() == nil {
			fmt.Fprintf(w, "data: %d\n\n", now())
			_ = control.Flush()
			select {
			case <-time.After(20 * time.Millisecond):
			case <-r.Context().Done():
			}
		}
		return
	case "/socket": // as much of a WebSocket as a proxy sees of it: an echo
		conn, rw, err := control.Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
		_, _ = io.Copy(conn, io.MultiReader(io.LimitReader(rw, int64(rw.Reader.Buffered())), conn))
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	fmt.Fprintln(w, "ok")
}
