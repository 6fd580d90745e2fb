// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// addressClient returns a client that connects from an address of this machine.
func addressClient(t testing.TB, from string) *http.Client {
	t.Helper()
	l, err := net.Listen("tcp", from+":0")
	if err != nil {
		t.Skipf("this machine has no other address to connect from: %v", err)
	}
	_ = l.Close()
	client := newClient(t, false)
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	client.Transport.(*http.Transport).DialContext = dialer.DialContext
	return client
}

// Who may say what the client's address is: a proxy that is trusted, and nobody
// else, whatever the header says.
func TestHostile_ForwardedFor(t *testing.T) {
	const client, proxy = "127.0.0.1", "127.0.0.2"
	c := start(t, config{site: "respond ok"})
	cases := []struct {
		name      string
		servers   string
		from      string
		forwarded []string // of one request each
		want      []int
	}{
		{
			"nobody is trusted", "", client,
			[]string{"198.51.100.1", "198.51.100.2", "198.51.100.3, 127.0.0.1", "::1"},
			[]int{200, 200, 429, 429},
		},
		{
			"a client that is not trusted", "trusted_proxies static " + proxy, client,
			[]string{"198.51.100.1", "198.51.100.2", "127.0.0.2", "127.0.0.2, 127.0.0.2"},
			[]int{200, 200, 429, 429},
		},
		{
			"a proxy that is", "trusted_proxies static " + proxy, proxy,
			[]string{"198.51.100.1", "198.51.100.1", "198.51.100.1", "198.51.100.2"},
			[]int{200, 200, 429, 200},
		},
		{
			// Why trusted_proxies_strict is recommended: the first address is the client's own word.
			"a proxy that appends, not strict", "trusted_proxies static " + proxy, proxy,
			[]string{"198.51.100.3, 203.0.113.1", "198.51.100.4, 203.0.113.1", "198.51.100.5, 203.0.113.1"},
			[]int{200, 200, 200},
		},
		{
			"a proxy that appends, strict", "trusted_proxies static " + proxy + "\n trusted_proxies_strict", proxy,
			[]string{"198.51.100.3, 203.0.113.1", "198.51.100.4, 203.0.113.1", "198.51.100.5, 203.0.113.1", "203.0.113.1, 203.0.113.2"},
			[]int{200, 200, 429, 200},
		},
		{
			"nonsense from a proxy, strict", "trusted_proxies static " + proxy + "\n trusted_proxies_strict", proxy,
			[]string{"nonsense", "", ",,,", "{env.PATH}"},
			[]int{200, 200, 429, 429}, // it is the proxy itself
		},
	}
	for i, row := range cases {
		t.Run(row.name, func(t *testing.T) {
			c = c.load(t, config{
				servers: row.servers,
				site:    fmt.Sprintf("stripe_ratelimit pool%d {\n key client_ip \n rate 1/h burst 2 \n}\n respond ok", i),
			})
			client := addressClient(t, row.from)
			for i, forwarded := range row.forwarded {
				a, err := c.try(t.Context(), client, http.MethodGet, "/", "X-Forwarded-For", forwarded)
				if err != nil {
					t.Fatal(err)
				}
				if a.status != row.want[i] {
					t.Errorf("request %d, %q: got %d, want %d", i+1, forwarded, a.status, row.want[i])
				}
			}
		})
	}
}

// What comes to the admin API over HTTP and is not from an operator changes nothing.
// That of other sites is refused by Caddy itself, before it reaches this module.
func TestHostile_AdminAPI(t *testing.T) {
	c := start(t, config{site: "stripe_ratelimit api {\n rate 1/h burst 2 \n}\n respond ok"})
	const off = `{"all":true,"mode":"off","ttl":"1h","reason":"test"}`
	form := []string{"Content-Type", "application/json"}
	cases := []struct {
		name, method, path, body string
		header                   []string
		want                     int
	}{
		{"another site's page", "POST", "switches", off, append(form, "Origin", "https://example.com"), 403},
		{"a sandboxed page", "POST", "switches", off, append(form, "Origin", "null"), 400},
		{"a page, without its origin", "POST", "switches", off, append(form, "Sec-Fetch-Mode", "no-cors"), 400},
		{"another site whose name leads here", "POST", "switches", off, append(form, "Host", "rebinding.example.com"), 403},
		{"the same, reading", "GET", "status", "", []string{"Host", "rebinding.example.com"}, 403},
		{"another port", "GET", "status", "", []string{"Host", "127.0.0.1:1"}, 403},
		{"what a form may send", "POST", "switches", off, []string{"Content-Type", "text/plain"}, 415},
		{"no type", "POST", "switches", off, nil, 415},
		{"a form", "POST", "switches", "all=true&mode=off", []string{"Content-Type", "application/x-www-form-urlencoded"}, 415},
		{"an upgrade", "GET", "status", "", []string{"Connection", "Upgrade", "Upgrade", "websocket"}, 400},
		{"another method", "PUT", "switches", off, form, 405},
		{"another method, of any name", "BREW", "status", "", nil, 405},
		{"a preflight", "OPTIONS", "switches", "", append(form, "Origin", "https://example.com", "Access-Control-Request-Method", "POST"), 403},
		{"another method by header", "GET", "keys/reset", "", append(form, "X-Http-Method-Override", "POST"), 405},
		{"another path", "POST", "switches/", off, form, 404},
		{"no JSON", "POST", "switches", strings.Repeat("[", 100_000), form, 400},
		{"deep JSON", "POST", "switches", `{"pool":` + strings.Repeat(`[`, 60_000) + strings.Repeat(`]`, 60_000) + `}`, form, 400},
		{"NUL and invalid UTF-8", "POST", "switches", "{\"all\":true,\"mode\":\"off\",\"ttl\":\"1h\",\"reason\":\"\x00\xff\"}", form, 400},
		{"a line break in what is logged", "POST", "switches", `{"all":true,"mode":"off","ttl":"1h","reason":"a\u2028b\r\nc"}`, form, 400},
		{"more than there may be", "POST", "switches", `{"reason":"` + strings.Repeat("x", 1<<20) + `"}`, form, 413},
	}
	for _, row := range cases {
		t.Run(row.name, func(t *testing.T) {
			req, err := http.NewRequest(row.method, "http://"+c.Admin+"/stripe_ratelimit/"+row.path, strings.NewReader(row.body))
			if err != nil {
				t.Fatal(err)
			}
			for i := 0; i < len(row.header); i += 2 {
				if row.header[i] == "Host" {
					req.Host = row.header[i+1]
				}
				req.Header.Set(row.header[i], row.header[i+1])
			}
			resp, err := newClient(t, false).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if resp.StatusCode != row.want {
				t.Errorf("got %d, want %d", resp.StatusCode, row.want)
			}
			if got := resp.Header.Get("Access-Control-Allow-Origin"); got != "" {
				t.Errorf("other sites may read it: %q", got)
			}
		})
	}
	if status, body := c.Ask(t, http.MethodGet, "/stripe_ratelimit/switches", ""); status != 200 || strings.TrimSpace(body) != `{"version":0,"switches":[]}` {
		t.Errorf("switches afterwards: got %d %s, want none", status, body)
	}
	// From a page of its own origin, or a tool, the same is done.
	if status, body := c.Ask(t, http.MethodPost, "/stripe_ratelimit/switches", off, append(form, "Origin", "http://"+c.Admin)...); status != 200 {
		t.Errorf("from its own origin: got %d %s, want 200", status, body)
	}
}

// Whatever stands in a key, a line of a log stays one line and has no part of it:
// the access log with the fields of this module and its own lines, as JSON and as
// text. Authorization is left out by Caddy itself.
func TestHostile_Logs(t *testing.T) {
	dir := t.TempDir()
	formats := []string{"json", "console"}
	global := ""
	for _, format := range formats {
		global += fmt.Sprintf("log %s {\n output file %s \n level DEBUG \n format %s {\n level_format upper \n}\n}\n", format, filepath.Join(dir, format), format)
	}
	c := start(t, config{
		global: global,
		site: `log
			stripe_ratelimit {
				rate 1/h burst 2
				rate composed 1/h burst 2 key {http.request.header.Authorization}/{http.auth.user.id}
			}
			respond ok`,
	})
	const mark = "Qz8Vx2Lw"
	hostile := []string{
		"\n2026/01/01 00:00:00.000\tERROR\tforged\t{}", "\r\n{\"level\":\"error\",\"msg\":\"forged\"}", "\x00", "\x1b[2J\x1b[31m", "\"},\"forged\":{\"",
		"\u2028\u2029\u0085", "\xff\xfe\xc0\xaf", "{http.request.header.Authorization}{env.PATH}{{}", "%0aforged%00", "\\n\\\"\\u000a", "%s%d%n", strings.Repeat("k", 4<<10),
	}
	sent := 0
	client := newClient(t, false)
	for _, key := range hostile {
		key = mark + key
		headers := []string{"Basic " + base64.StdEncoding.EncodeToString([]byte(key+":"+mark))}
		if !strings.ContainsAny(key, "\n\r\x00\x1b") { // which no client can send
			headers = append(headers, "Bearer bearer"+key)
		}
		for _, header := range headers {
			for i, want := range []int{200, 200, 429, 429} {
				a, err := c.try(t.Context(), client, http.MethodGet, "/", "Authorization", header)
				if err != nil {
					t.Fatalf("%q: %v", header, err)
				}
				if a.status != want {
					t.Errorf("%.100q: request %d: got %d, want %d", header, i+1, a.status, want)
				}
				sent++
			}
		}
	}
	c.Stop()
	for _, format := range formats {
		text, err := os.ReadFile(filepath.Join(dir, format))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), mark) || strings.Contains(string(text), base64.StdEncoding.EncodeToString([]byte(mark))[:8]) {
			t.Errorf("%s: a key, or a part of it, is in it", format)
		}
		if odd := regexp.MustCompile(`[^\n\t -~]`).Find(text); odd != nil {
			t.Errorf("%s: %q is in it", format, odd)
		}
		begin := regexp.MustCompile(`^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}\t(DEBUG|INFO|WARN|ERROR)\t`)
		handled := 0
		for line := range strings.Lines(string(text)) {
			if format == "json" && !json.Valid([]byte(line)) || format == "console" && !begin.MatchString(line) {
				t.Errorf("%s: this is not a line: %.200q", format, line)
			}
			if strings.Contains(line, "handled request") {
				handled++
				if !strings.Contains(line, `"ratelimit_identity"`) {
					t.Errorf("%s: no fields of ours: %.300s", format, line)
				}
			}
		}
		if handled != sent {
			t.Errorf("%s: %d requests, want %d", format, handled, sent)
		}
	}
}
