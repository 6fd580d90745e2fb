// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

func init() { caddy.RegisterModule(noSource{}) }

// noSource is a module that tells no utilization.
type noSource struct{}

func (noSource) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "stripe_ratelimit.utilization.test_no_source", New: func() caddy.Module { return new(noSource) }}
}

// TestShedders_ValidateConfig has the mistakes that only JSON can hold beside
// some that the Caddyfile's golden errors have as well.
func TestShedders_ValidateConfig(t *testing.T) {
	cases := []struct {
		name string
		json string
		want string // part of the error; empty: valid
	}{
		{"fleet alone", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1, "reserve": 0}}`, ""},
		{"largest fleet", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1000000000, "reserve": 100}}`, ""},
		{"auto", `{"critical": [{"path": ["/a"]}], "fleet": {"auto": true, "reserve": 20}, "workers": {"count": 1}}`, ""},
		{"workers alone", `{"workers": {"count": 1}}`, ""},
		{"workers by another source", `{"workers": {"utilization": {"source": "probe"}}}`, ""},
		{"all of workers", `{"workers": {"count": 1, "good": 1, "bad": 99, "grace": 0, "ramp": 1, "mode": {"state": "enforce", "percent": 0}}}`, ""},
		{"fleet of nothing", `{"critical": [{"path": ["/a"]}], "fleet": {}}`, "fleet 0; at least 1 is needed (or auto)"},
		{"fleet below nothing", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": -1, "reserve": 20}}`, "fleet -1"},
		{"fleet too large", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1000000001, "reserve": 20}}`, "fleet: capacity 1000000001 is not between 1 and 1000000000"},
		{"capacity and auto", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1, "auto": true, "reserve": 20}}`, "choose one"},
		{"no reserve", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1}}`, "no reserve"},
		{"null for a reserve", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1, "reserve": null}}`, "no reserve"},
		{"reserve below 0", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1, "reserve": -1}}`, "reserve of -1"},
		{"reserve above 100", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1, "reserve": 101}}`, "reserve of 101"},
		{"mode of fleet", `{"critical": [{"path": ["/a"]}], "fleet": {"capacity": 1, "reserve": 20, "mode": {}}}`, "mode ''"},
		{"fleet without critical", `{"fleet": {"capacity": 1, "reserve": 20}}`, "fleet without critical"},
		{"fleet with empty critical", `{"critical": [], "fleet": {"capacity": 1, "reserve": 20}}`, "fleet without critical"},
		{"auto without workers", `{"critical": [{"path": ["/a"]}], "fleet": {"auto": true, "reserve": 20}}`, "fleet auto without workers <n>"},
		{"auto and workers by another source", `{"critical": [{"path": ["/a"]}], "fleet": {"auto": true, "reserve": 20}, "workers": {"utilization": {"source": "probe"}}}`, "fleet auto without workers <n>"},
		{"auto and too many workers", `{"critical": [{"path": ["/a"]}], "fleet": {"auto": true, "reserve": 20}, "workers": {"count": 1000000001}}`, "fleet: 1000000001 workers"},
		{"workers without a number", `{"workers": {}}`, "workers without a number"},
		{"workers of nothing", `{"workers": {"count": 0}}`, "workers without a number"},
		{"workers below nothing", `{"workers": {"count": -1}}`, "workers -1"},
		{"in flight without a number", `{"workers": {"utilization": {"source": "in_flight"}}}`, "workers without a number"},
		{"good below 0", `{"workers": {"count": 1, "good": -1}}`, "good -1% and bad 80%"},
		{"good above bad", `{"workers": {"count": 1, "good": 90}}`, "good 90% and bad 80%"},
		{"bad at 100", `{"workers": {"count": 1, "bad": 100}}`, "good 70% and bad 100%"},
		{"negative grace", `{"workers": {"count": 1, "grace": "-1s"}}`, "grace must not be negative"},
		{"negative ramp", `{"workers": {"count": 1, "ramp": "-1s"}}`, "ramp must be longer than zero"},
		{"mode of workers", `{"workers": {"count": 1, "mode": {"state": "dark", "percent": 5}}}`, "no percentage"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			h := new(Handler)
			if err := caddy.StrictUnmarshalJSON([]byte(c.json), h); err != nil {
				t.Fatal(err)
			}
			testValidate(t, h, c.want)
		})
	}
}

// A fifth of a percent is never what somebody means who writes 0.2.
func TestShedders_FractionsArePercentsNowhere(t *testing.T) {
	for _, text := range []string{
		`{"fleet": {"capacity": 1, "reserve": 0.2}}`,
		`{"workers": {"count": 1, "good": 0.7}}`,
		`{"workers": {"count": 1, "bad": 0.8}}`,
	} {
		if err := caddy.StrictUnmarshalJSON([]byte(text), new(Handler)); err == nil || !strings.Contains(err.Error(), "number 0.") {
			t.Errorf("%s: got %v, want an error about the number", text, err)
		}
	}
}

func TestShedders_Settings(t *testing.T) {
	cases := []struct {
		name string
		json string
		want shedding.WorkersSettings
	}{
		{"defaults", `{"count": 64}`, shedding.WorkersSettings{Count: 64, Ramp: shedding.Ramp{
			Good: 0.7, Bad: 0.8, Grace: 28 * time.Second, Ramp: 120 * time.Second,
		}}},
		{"all given", `{"count": 8, "good": 29, "bad": 57, "grace": "1m", "ramp": "5m"}`, shedding.WorkersSettings{Count: 8, Ramp: shedding.Ramp{
			Good: 0.29, Bad: 0.57, Grace: time.Minute, Ramp: 5 * time.Minute,
		}}},
		{"no grace", `{"count": 8, "grace": 0}`, shedding.WorkersSettings{Count: 8, Ramp: shedding.Ramp{
			Good: 0.7, Bad: 0.8, Ramp: 120 * time.Second,
		}}},
	}
	for _, c := range cases {
		w := new(WorkerShedder)
		if err := caddy.StrictUnmarshalJSON([]byte(c.json), w); err != nil {
			t.Fatal(err)
		}
		if got := w.settings(); got.Count != c.want.Count || got.Ramp != c.want.Ramp {
			t.Errorf("%s: got %+v, want %+v", c.name, got, c.want)
		}
	}
}

// The handlers of a pool say the same of its shedders, or nothing.
func TestShedders_HandlersOfAPool(t *testing.T) {
	cases := []struct {
		name          string
		first, second string   // what two handlers say
		want          []string // parts of the error; none: valid
	}{
		{"one says nothing", "fleet 10 reserve 20%\nworkers 8", "rate 1/s", nil},
		{"each says one", "fleet 10 reserve 20%", "workers 8", nil},
		{"the same", "fleet 10 reserve 20%\nworkers 8", "fleet 10 reserve 20%\nworkers 8", nil},
		{"the same in other words", "workers 8\nfleet auto reserve 20 mode enforce",
			"workers 8 good 70% bad 80% grace 28s ramp 2m utilization in_flight\nfleet auto reserve 20% mode enforce 100%", nil},
		{"the same probe", "workers utilization probe http://localhost:1/", "workers utilization probe http://localhost:1/", nil},
		{"other capacity", "fleet 10 reserve 20%", "fleet 20 reserve 20%", []string{
			"fleet 10 reserve 20% in one handler", "fleet 20 reserve 20% in another",
		}},
		{"auto in one", "fleet 10 reserve 20%", "workers 8\nfleet auto reserve 20%", []string{
			"fleet 10 reserve 20% in one handler", "fleet auto reserve 20% in another",
		}},
		{"other reserve", "fleet 10 reserve 20%", "fleet 10 reserve 0", []string{"reserve 20%", "reserve 0%"}},
		{"other mode of the fleet", "fleet 10 reserve 20%", "fleet 10 reserve 20% mode dark", []string{
			"fleet 10 reserve 20% in one handler", "fleet 10 reserve 20% (dark) in another",
		}},
		{"other workers", "workers 8", "workers 16", []string{
			"workers 8 good 70% bad 80% grace 28s ramp 2m0s in one handler", "workers 16 good 70% bad 80% grace 28s ramp 2m0s in another",
		}},
		{"other good", "workers 8", "workers 8 good 60%", []string{"good 70%", "good 60%"}},
		{"other bad", "workers 8", "workers 8 bad 90%", []string{"bad 80%", "bad 90%"}},
		{"other grace", "workers 8", "workers 8 grace 0s", []string{"grace 28s", "grace 0s"}},
		{"other ramp", "workers 8", "workers 8 ramp 1m", []string{"ramp 2m0s", "ramp 1m0s"}},
		{"other mode of the workers", "workers 8 mode enforce 5", "workers 8", []string{"(enforced for 5% of the keys)"}},
		{"other source", "workers 8", "workers 8 utilization probe http://localhost:1/", []string{
			`utilization {"source":"probe","url":"http://localhost:1/"}`,
		}},
		{"other probe", "workers utilization probe http://localhost:1/ /a", "workers utilization probe http://localhost:1/ /b", []string{`"/a"`, `"/b"`}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			// In a route, because servers are provisioned in any order.
			config := func(second string) string {
				return "http://:8080 {\n\troute {\n\t\tstripe_ratelimit one {\n\t\t\tcritical /a\n" + c.first +
					"\n\t\t}\n\t\tstripe_ratelimit " + second + " {\n\t\t\tcritical /a\n" + c.second + "\n\t\t}\n\t}\n}\n"
			}
			err := provision(t, config("one"))
			if c.want == nil {
				if err != nil {
					t.Errorf("got error %v, want none", err)
				}
				return
			}
			for _, part := range append(c.want, `pool "one"`) {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Errorf("got error %v, want one with %s", err, part)
				}
			}
			if err := provision(t, config("two")); err != nil {
				t.Errorf("in two pools: got error %v, want none", err)
			}
		})
	}
}

// provision adapts a Caddyfile and provisions what comes out.
func provision(t *testing.T, caddyfile string) error {
	t.Helper()
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		t.Fatal(err)
	}
	var config caddy.Config
	if err := caddy.StrictUnmarshalJSON(adapted, &config); err != nil {
		t.Fatal(err)
	}
	return caddy.Validate(&config)
}

// What a config says in other white space is the same.
func TestWorkerShedder_String(t *testing.T) {
	for _, source := range []string{`{"source":"probe","url":"http://a/"}`, "{\n\t\"source\": \"probe\",\n\t\"url\": \"http://a/\"\n}"} {
		w := &WorkerShedder{Count: 8, UtilizationRaw: json.RawMessage(source)}
		if got, want := w.String(), `workers 8 good 70% bad 80% grace 28s ramp 2m0s utilization {"source":"probe","url":"http://a/"}`; got != want {
			t.Errorf("String() of %s: got %s, want %s", source, got, want)
		}
	}
}

// Sources are checked when the config is loaded, and only there if they come
// from JSON or from the environment.
func TestUtilization_Provision(t *testing.T) {
	t.Setenv("LOAD_URL", "http://localhost:1/")
	t.Setenv("LOAD_PATH", "localhost:1")
	cases := []struct {
		name string
		json string
		want string // part of the error; empty: valid
	}{
		{"in flight", `{"source": "in_flight"}`, ""},
		{"probe", `{"source": "probe", "url": "http://localhost:1/"}`, ""},
		{"probe from the environment", `{"source": "probe", "url": "{env.LOAD_URL}"}`, ""},
		{"probe from an empty environment", `{"source": "probe", "url": "{env.LOAD_NOT_SET}"}`, "LOAD_NOT_SET"},
		{"probe of no address in the environment", `{"source": "probe", "url": "{env.LOAD_PATH}"}`, "http://"},
		{"probe without url", `{"source": "probe"}`, "http://"},
		{"probe with a bad pointer", `{"source": "probe", "url": "http://localhost:1/", "pointer": "busy"}`, "'busy'"},
		{"probe with another field", `{"source": "probe", "url": "http://localhost:1/", "every": 1}`, "every"},
		{"in flight with a field", `{"source": "in_flight", "count": 1}`, "count"},
		{"unknown", `{"source": "cpu"}`, "stripe_ratelimit.utilization.cpu"},
		{"no source", `{}`, "source"},
		{"null", `null`, "source"},
		{"a module that tells no utilization", `{"source": "test_no_source"}`, "noSource is no source of utilization"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var config caddy.Config
			text := `{"apps": {"http": {"servers": {"a": {"routes": [{"handle": [{"handler": "stripe_ratelimit", "pool": "sources",
				"workers": {"count": 8, "utilization": ` + c.json + `}}]}]}}}}}`
			if err := caddy.StrictUnmarshalJSON([]byte(text), &config); err != nil {
				t.Fatal(err)
			}
			err := caddy.Validate(&config)
			if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got error %v, want %q", err, c.want)
			}
		})
	}
}
