// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/redistest"
)

// ask sends a request to the admin API, as Caddy's admin server would.
func ask(method, path, body string) (status int, answer string) {
	r := httptest.NewRequest(method, adminBase+path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	err := new(adminAPI).serve(w, r)
	var refused caddy.APIError
	switch {
	case errors.As(err, &refused):
		return refused.HTTPStatus, refused.Err.Error()
	case err != nil:
		return http.StatusInternalServerError, err.Error()
	}
	return w.Code, w.Body.String()
}

const testPools = `	@charges path /charges
	stripe_ratelimit api {
		critical @charges
		rate 6/h burst 2
		rate search 6/h burst 10
		concurrency 1
		fleet 100 reserve 20%
		workers 10
	}`

func TestAdmin_WrongInputChangesNothing(t *testing.T) {
	s := newServer(t)
	s.load(app(nil), testPools)
	hash := `"identity":"` + strings.Repeat("0f", 16) + `"`
	note := `"ttl":"1h","reason":"test"`
	cases := []struct {
		method, path, body string
		status             int
		says               string
	}{
		{"GET", "nothing", ``, 404, "/stripe_ratelimit/status"},
		{"GET", "", ``, 404, "/stripe_ratelimit/status"},
		{"POST", "status", `{}`, 405, "GET"},
		{"PUT", "switches", `{}`, 405, "DELETE, GET, POST"},
		{"GET", "keys/inspect", ``, 405, "POST"},

		{"POST", "switches", ``, 400, "the body is empty"},
		{"POST", "switches", `[]`, 400, "no such JSON object"},
		{"POST", "switches", `{"all":true,"mode":"off",` + note + `} {}`, 400, "something follows"},
		{"POST", "switches", `{"polo":"api","mode":"off",` + note + `}`, 400, `unknown field "polo"`},
		{"POST", "switches", `{"mode":"off",` + note + `}`, 400, "which limits?"},
		{"POST", "switches", `{"all":true,"pool":"api","mode":"off",` + note + `}`, 400, "all and a target"},
		{"POST", "switches", `{"all":true,` + note + `}`, 400, "no mode"},
		{"POST", "switches", `{"all":true,"mode":"on",` + note + `}`, 400, "not off, dark or enforce"},
		{"POST", "switches", `{"all":true,"mode":"enforce 101",` + note + `}`, 400, "percentage"},
		{"POST", "switches", `{"all":true,"mode":"enforce",` + note + `}`, 400, "can only weaken"},
		{"POST", "switches", `{"all":true,"mode":"off","reason":"test"}`, 400, "no ttl"},
		{"POST", "switches", `{"all":true,"mode":"off","ttl":"soon","reason":"test"}`, 400, "no duration"},
		{"POST", "switches", `{"all":true,"mode":"off","ttl":"-1h","reason":"test"}`, 400, "ttl"},
		{"POST", "switches", `{"all":true,"mode":"off","ttl":"4000d","reason":"test"}`, 400, "ttl"},
		{"POST", "switches", `{"all":true,"mode":"off","ttl":"1h"}`, 400, "no reason"},
		{"POST", "switches", `{"all":true,"mode":"off","ttl":"1h","reason":"two\nlines"}`, 400, "one line"},
		{"POST", "switches", `{"all":true,"mode":"off","ttl":"1h","reason":"` + strings.Repeat("x", 201) + `"}`, 400, "200 characters"},
		{"POST", "switches", `{"all":true,"mode":"off","scope":"world",` + note + `}`, 400, "fleet or instance"},
		{"POST", "switches", `{"pool":"apo","mode":"off",` + note + `}`, 400, "api/rate/search"},
		{"POST", "switches", `{"pool":"api","kind":"speed","mode":"off",` + note + `}`, 400, "speed"},
		{"POST", "switches", `{"pool":"api","limit":"search","mode":"off",` + note + `}`, 400, "kind"},
		{"POST", "switches", `{"all":true,"mode":"off","reason":"` + strings.Repeat("x", maxAdminBody) + `"}`, 413, "bytes"},
		{"DELETE", "switches", `{"all":true,"mode":"off"}`, 400, "neither mode"},
		{"DELETE", "switches", `{"all":true}`, 404, "nothing to clear"},
		{"DELETE", "switches", `{"pool":"api"}`, 404, "nothing to clear"},

		{"POST", "overrides", `{"pool":"api","kind":"rate","limit":"rate","requests":1,"burst":1,` + note + `}`, 400, "whose limits?"},
		{"POST", "overrides", `{"pool":"api","kind":"rate","limit":"rate","identity":"0f","requests":1,"burst":1,` + note + `}`, 400, "32 hexadecimal digits"},
		{"POST", "overrides", `{"pool":"api","kind":"rate","limit":"rate","value":"sk_1",` + hash + `,"requests":1,` + note + `}`, 400, "an identity and a value"},
		{"POST", "overrides", `{"pool":"api","kind":"rate","limit":"rat",` + hash + `,"requests":1,"burst":1,` + note + `}`, 400, "rate, search"},
		{"POST", "overrides", `{"pool":"api","kind":"rate",` + hash + `,"requests":1,"burst":1,` + note + `}`, 400, "one limit"},
		{"POST", "overrides", `{"pool":"api","kind":"rate","limit":"rate",` + hash + `,` + note + `}`, 400, "requests"},
		{"POST", "overrides", `{"pool":"api","kind":"rate","limit":"rate",` + hash + `,"requests":-1,"burst":1,` + note + `}`, 400, "at least 1"},
		{"POST", "overrides", `{"pool":"api","kind":"rate","limit":"rate",` + hash + `,"requests":9000000000000,"burst":1,` + note + `}`, 400, "a second"},
		{"POST", "overrides", `{"pool":"api","kind":"concurrency","limit":"concurrency",` + hash + `,"requests":1,` + note + `}`, 400, "capacity"},
		{"POST", "overrides", `{"pool":"api","kind":"workers","limit":"workers",` + hash + `,"capacity":1,` + note + `}`, 400, "per identity"},
		{"POST", "overrides", `{"pool":"api","kind":"rate","limit":"rate",` + hash + `,"requests":1,"burst":1,"reason":"test"}`, 400, "no ttl"},
		{"DELETE", "overrides", `{"pool":"api","kind":"rate","limit":"rate",` + hash + `}`, 404, "nothing to clear"},
		{"DELETE", "overrides", `{"pool":"api","kind":"rate","limit":"rate",` + hash + `,"requests":1}`, 400, "neither numbers"},

		{"POST", "keys/inspect", `{"pool":"api"}`, 400, "whose limits?"},
		{"POST", "keys/inspect", `{"pool":"apo",` + hash + `}`, 400, "there are api"},
		{"POST", "keys/inspect", `{"pool":"api","source":"apikey","value":"x"}`, 400, "apikey"},
		{"POST", "keys/inspect", `{"pool":"api","source":"client_ip","value":"nowhere"}`, 400, "address"},
		{"POST", "keys/reset", `{"pool":"api",` + hash + `}`, 400, "no reason"},
	}
	for _, c := range cases {
		status, answer := ask(c.method, c.path, c.body)
		if status != c.status || !strings.Contains(answer, c.says) {
			t.Errorf("%s %s %.100s:\ngot  %d %s\nwant %d … %s …", c.method, c.path, c.body, status, answer, c.status, c.says)
		}
	}
	for path, want := range map[string]string{
		"switches":  `{"version":0,"switches":[]}`,
		"overrides": `{"version":0,"overrides":[]}`,
	} {
		if status, answer := ask("GET", path, ""); status != 200 || strings.TrimSpace(answer) != want {
			t.Errorf("GET %s afterwards: got %d %s, want %s", path, status, answer, want)
		}
	}
	s.want("k", 200, 200, 429)
}

func TestAdmin_WithoutConfig(t *testing.T) {
	if status, answer := ask("GET", "status", ""); status != 200 || !strings.Contains(answer, `"store":null,"pools":[]`) {
		t.Errorf("GET status: got %d %s, want an empty one", status, answer)
	}
	if status, answer := ask("POST", "switches", `{"all":true,"mode":"off","ttl":"1h","reason":"test"}`); status != 503 || !strings.Contains(answer, "limits nothing") {
		t.Errorf("POST switches: got %d %s, want 503", status, answer)
	}
}

func TestAdmin_Switches(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		s.load(global, testPools)
		s.want("k", 200, 200, 429)

		mustAsk(t, "POST", "switches", `{"pool":"api","kind":"rate","limit":"rate","mode":"dark","ttl":"1h","reason":"too low","actor":"anna"}`)
		s.want("k", 200, 200)
		mustAsk(t, "POST", "switches", `{"all":true,"mode":"off","ttl":"1h","reason":"test","scope":"instance"}`)
		s.want("k", 200)

		var found struct{ Switches []map[string]any }
		decodeAnswer(t, mustAsk(t, "GET", "switches", ""), &found)
		var got []string
		for _, w := range found.Switches {
			text, _ := json.Marshal([]any{w["pool"], w["kind"], w["limit"], w["mode"], w["scope"], w["reason"], w["actor"]})
			got = append(got, string(text))
		}
		want := `[null,null,null,"off","instance","test","admin API"] ["api","rate","rate","dark","fleet","too low","anna"]`
		if strings.Join(got, " ") != want {
			t.Errorf("switches:\ngot  %s\nwant %s", strings.Join(got, " "), want)
		}

		// A reload keeps both, a config that is rejected as well.
		s.load(global, testPools)
		if err := caddy.Load(withApp(t, s.config(global, testPools), "failing_app"), true); err == nil {
			t.Fatal("a config with an app that does not start was accepted")
		}
		s.want("k", 200)

		mustAsk(t, "DELETE", "switches", `{"all":true,"scope":"instance"}`)
		s.want("k", 200)
		mustAsk(t, "DELETE", "switches", `{"pool":"api","kind":"rate","limit":"rate"}`)
		s.want("k", 429)
	})
}

func TestAdmin_Keys(t *testing.T) {
	onBothStores(t, func(t *testing.T, s *server, global string) {
		s.load(global, testPools)
		s.want("k", 200, 200, 429)
		release := s.held("busy", "other")

		look := func(key string) map[string]inspectedLimit {
			var found inspection
			decodeAnswer(t, mustAsk(t, "POST", "keys/inspect", `{"pool":"api","value":"`+key+`"}`), &found)
			limits := map[string]inspectedLimit{}
			for _, l := range found.Limits {
				limits[l.Kind+"/"+l.Limit] = l
			}
			return limits
		}
		for range 3 { // it consumes nothing
			l := look("k")["rate/rate"]
			if *l.Tokens != 0 || l.Burst != 2 || l.NextAllowed <= 590 || l.NextAllowed > 600 {
				t.Fatalf("rate of a drained key: got %d of %d tokens, next in %v s; want 0 of 2, 600 s", *l.Tokens, l.Burst, l.NextAllowed)
			}
		}
		if l := look("other")["concurrency/concurrency"]; *l.InProgress != 1 || l.Capacity != 1 || len(l.Leases) != 1 || l.NextAllowed <= 0 {
			t.Errorf("concurrency of a busy key: got %+v, want 1 lease of 1", l)
		}
		release()

		mustAsk(t, "POST", "keys/reset", `{"pool":"api","value":"k","reason":"test"}`)
		if l := look("k")["rate/rate"]; *l.Tokens != 2 {
			t.Errorf("after the reset: got %d tokens, want 2", *l.Tokens)
		}
		s.want("k", 200, 200, 429)

		// The burst follows in proportion if it is not given.
		set := `{"pool":"api","kind":"rate","limit":"rate","value":"k","requests":12,"ttl":"1h","reason":"test"}`
		mustAsk(t, "POST", "overrides", set)
		if l := look("k")["rate/rate"]; l.Burst != 4 || l.Numbers != "12/h burst 4" || l.Override == nil || l.Override.Reason != "test" {
			t.Errorf("with an override: got %+v", l)
		}
		if l := look("other")["rate/rate"]; l.Burst != 2 || l.Override != nil {
			t.Errorf("of somebody else: got %+v", l)
		}
		mustAsk(t, "POST", "keys/reset", `{"value":"k","reason":"test"}`)
		s.want("k", 200, 200, 200, 200, 429)
		mustAsk(t, "DELETE", "overrides", `{"pool":"api","kind":"rate","limit":"rate","value":"k"}`)
		if l := look("k")["rate/rate"]; l.Burst != 2 || l.Override != nil {
			t.Errorf("without the override: got %+v", l)
		}
	})
}

// While the store fails, keys are what this instance decides by alone, and say so.
func TestAdmin_KeysInAnOutage(t *testing.T) {
	redis := redistest.Start(t)
	s := newServer(t)
	s.load(app(redis), "stripe_ratelimit api {\n on_store_error local\n rate 6/h burst 4\n concurrency 3\n}")
	s.want("k", 200, 200)
	o := operating(t)
	const of, reset = `{"pool":"api","value":"k"}`, `{"pool":"api","value":"k","reason":"test"}`
	look := func() (found inspection) {
		t.Helper()
		decodeAnswer(t, mustAsk(t, "POST", "keys/inspect", of), &found)
		return found
	}
	fromStore := func(tokens int64) {
		t.Helper()
		found := look()
		if l := found.Limits[0]; found.From != "store" || found.StoreError != "" || l.Numbers != "6/h burst 4" || *l.Tokens != tokens {
			t.Errorf("got %+v with %d tokens, want %d of 6/h burst 4 from the store", found, *l.Tokens, tokens)
		}
	}
	fromLocal := func(tokens int64) {
		t.Helper()
		found := look()
		if l := found.Limits[0]; found.From != "local" || l.Numbers != "1/3 of 6/h burst 4" || l.Burst != 2 || *l.Tokens != tokens {
			t.Errorf("got %+v with %d of %d tokens, want %d of 2, 1/3 of 6/h burst 4, from here", found, *l.Tokens, l.Burst, tokens)
		}
		if l := found.Limits[1]; l.Numbers != "1/3 of 3 in progress" || *l.InProgress != 0 || l.Capacity != 1 {
			t.Errorf("got %+v, want one slot, which is free", l)
		}
		if found.StoreError != "connection" && found.StoreError != "breaker_open" {
			t.Errorf("got the reason %q, want connection or breaker_open", found.StoreError)
		}
	}
	outage := func() {
		redis.Kill()
		eventually(t, func() bool { _, _, down := o.status(); return down != nil })
		o.store.control.instances.Store(3) // as if there were
	}
	fromStore(2)

	outage()
	for path, body := range map[string]string{"keys/inspect": of, "keys/reset": reset} { // nobody has decided alone yet
		if status, answer := ask("POST", path, body); status != 503 || !strings.Contains(answer, "nothing is known and nothing was changed") {
			t.Errorf("%s: got %d %s, want 503", path, status, answer)
		}
	}
	s.want("k", 200, 200, 429)
	fromLocal(0)
	status, answer := ask("POST", "keys/reset", reset)
	if want := "the store does not answer: what this instance decides by alone meanwhile is full, but nothing else: "; status != 503 || !strings.HasPrefix(answer, want) {
		t.Errorf("reset: got %d %s, want 503 %s…", status, answer, want)
	}
	fromLocal(2)
	s.want("k", 200, 200, 429)

	// What is reset while the store works is full in the next outage, too.
	redis.Restart()
	eventually(t, func() bool { _, _, down := o.status(); return down == nil && look().From == "store" })
	fromStore(4)
	mustAsk(t, "POST", "keys/reset", reset)
	outage()
	fromLocal(2)
}

func TestParseClientAddr(t *testing.T) {
	for text, want := range map[string]string{
		"203.0.113.7":         "203.0.113.7",
		"203.0.113.7/32":      "203.0.113.7",
		"::ffff:203.0.113.7":  "203.0.113.7",
		"2001:db8:1:2:3::4":   "2001:db8:1:2::",
		"2001:db8:1:2::/56":   "2001:db8:1::",
		"2001:db8:1:2:3::%e0": "2001:db8:1:2::",
		"203.0.113.0/24":      "",
		"nowhere":             "",
	} {
		addr, err := parseClientAddr(text)
		if got := addr.String(); (err != nil) != (want == "") || err == nil && got != want {
			t.Errorf("%s: got %s, %v; want %q", text, got, err, want)
		}
	}
}

func TestAdmin_Status(t *testing.T) {
	s := newServer(t)
	s.load(app(nil), testPools)
	s.want("k", 200, 200, 429)
	mustAsk(t, "POST", "switches", `{"pool":"api","kind":"rate","limit":"search","mode":"enforce 5","ttl":"1h","reason":"test"}`)
	var got status
	decodeAnswer(t, mustAsk(t, "GET", "status", ""), &got)
	if got.Store == nil || got.Store.Store != "memory" || len(got.Pools) != 1 || len(got.Switches) != 1 {
		t.Fatalf("got %+v", got)
	}
	var lines []string
	for _, l := range got.Pools[0].Limits {
		lines = append(lines, strings.Join([]string{l.Kind, l.Limit, l.Numbers, l.Mode, l.Source}, "|"))
	}
	want := `rate|rate|6/h burst 2|enforce|config
rate|search|6/h burst 10|enforce 5|switch
concurrency|concurrency|1 in progress|enforce|config
fleet|fleet|100 in progress fleet-wide, 80 for non-critical|enforce|config
workers|workers|10 on this instance|enforce|config`
	if strings.Join(lines, "\n") != want {
		t.Errorf("limits:\ngot\n%s\nwant\n%s", strings.Join(lines, "\n"), want)
	}
	if p := got.Pools[0]; p.Workers == nil || p.Fleet == nil || p.Fleet.Allocation != 80 || p.Fleet.Capacity != 100 {
		t.Errorf("shedders: got %+v %+v", p.Workers, p.Fleet)
	}
}

func mustAsk(t *testing.T, method, path, body string) string {
	t.Helper()
	status, answer := ask(method, path, body)
	if status != http.StatusOK {
		t.Fatalf("%s %s %s: got %d %s, want 200", method, path, body, status, answer)
	}
	return answer
}

func decodeAnswer(t *testing.T, text string, v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), v); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
}

// What docs/admin-api.md shows works as it stands, and is answered in the form
// that it shows.
func TestAdmin_Documentation(t *testing.T) {
	s := newServer(t)
	s.load(app(nil), testPools)
	strictly := func(text string, v any) {
		t.Helper()
		d := json.NewDecoder(strings.NewReader(text))
		d.DisallowUnknownFields()
		if err := d.Decode(v); err != nil {
			t.Errorf("%v in\n%s", err, text)
		}
	}
	text := readFile(t, "docs/admin-api.md")
	request := regexp.MustCompile("(?s)curl -X (\\w+) localhost:2019/stripe_ratelimit/(\\S+) [^\n]*\n  -d '([^\n]*)'\n```\n+```json\n(.*?)```")
	found := request.FindAllStringSubmatch(text, -1)
	if len(found) != 4 {
		t.Fatalf("got %d requests, want 4", len(found))
	}
	for _, m := range found {
		shown, answer := any(new(changeAnswer)), any(new(changeAnswer))
		if m[2] == "keys/inspect" {
			shown, answer = new(inspection), new(inspection)
		}
		strictly(m[4], shown)
		strictly(mustAsk(t, m[1], m[2], m[3]), answer)
		shape := regexp.MustCompile(`[0-9a-f]{32}`)
		if c, ok := answer.(*changeAnswer); ok { // whose words depend on the store
			got := shape.ReplaceAllString(c.Message, "…")
			want := shape.ReplaceAllString(shown.(*changeAnswer).Message, "…")
			if got = strings.Replace(got, "on this instance", "on every instance within half a second", 1); got != want {
				t.Errorf("%s: got %q, want %q", m[2], got, want)
			}
		}
	}
	example := regexp.MustCompile("(?s)## Status\n.*?```json\n(.*?)```").FindStringSubmatch(text)
	strictly(example[1], new(status))
	strictly(mustAsk(t, "GET", "status", ""), new(status))
	for path, methods := range endpoints {
		for method := range methods {
			if !strings.Contains(text, "`"+method+" "+adminBase+path+"`") {
				t.Errorf("there is no %s %s", method, path)
			}
		}
	}
}
