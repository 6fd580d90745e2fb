// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/hashicorp/go-retryablehttp"
)

// go-retryablehttp obeys Retry-After to the millisecond, a 0 too: it must never
// be told to come back at once.
func TestRetryablehttp_WaitsASecond(t *testing.T) {
	key := keyOf(t)
	exchanges, err := untilDenied(t, func(client *http.Client) error {
		retrying := retryablehttp.NewClient()
		retrying.HTTPClient, retrying.Logger = client, nil
		return get(retrying.StandardClient(), http.MethodGet, siteURLs[second]+"/v1/customers", key)
	})
	if err != nil {
		t.Fatalf("%v after %d tries", err, len(exchanges))
	}
	for i, e := range exchanges[:len(exchanges)-1] {
		seconds, err := strconv.Atoi(e.header.Get("Retry-After"))
		if err != nil || seconds < 1 {
			t.Errorf("try %d: Retry-After: %q, want at least 1", i, e.header.Get("Retry-After"))
		}
		if pause := exchanges[i+1].sent.Sub(e.received); pause < time.Duration(seconds)*time.Second {
			t.Errorf("try %d came after %v, want at least %d s", i+1, pause, seconds)
		}
	}
	if last := exchanges[len(exchanges)-1]; last.status != http.StatusOK {
		t.Errorf("got %d in the end, want 200", last.status)
	}
}

// Every RateLimit and RateLimit-Policy field is a list of strings with integer
// parameters, by an independent parser.
func TestRateLimitFields(t *testing.T) {
	names := []string{"concurrency", "minute", "rate"}

	t.Run("allowed", func(t *testing.T) {
		rec := new(recorder)
		if err := get(rec.client(), http.MethodGet, siteURLs[busy]+"/v1/customers", keyOf(t)); err != nil {
			t.Fatal(err)
		}
		allowed := rec.all()[0]
		if allowed.status != http.StatusOK {
			t.Fatalf("got %d, want 200", allowed.status)
		}
		policies := parse(t, allowed.header, "RateLimit-Policy")
		if got := slices.Sorted(maps.Keys(policies)); !slices.Equal(got, names) {
			t.Errorf("RateLimit-Policy names %q, want %q", got, names)
		}
		limits := parse(t, allowed.header, "RateLimit")
		if got := slices.Sorted(maps.Keys(limits)); !slices.Equal(got, names) {
			t.Errorf("RateLimit names %q, want %q", got, names)
		}
		for name, want := range map[string]map[string]any{
			"rate":        {"q": int64(500), "w": int64(5)},
			"minute":      {"q": int64(50), "w": int64(3)},
			"concurrency": {"q": int64(1), "qu": "concurrent-requests"},
		} {
			if !maps.Equal(policies[name], want) {
				t.Errorf("RateLimit-Policy %q has %v, want %v", name, policies[name], want)
			}
		}
		if got := limits["concurrency"]; !maps.Equal(got, map[string]any{"r": int64(0)}) {
			t.Errorf("RateLimit \"concurrency\" has %v, want r=0: this request took the only slot", got)
		}
	})

	cases := []struct {
		name  string
		site  int
		limit string
		busy  bool
		timed bool // the wait is known
	}{
		{"denied by rate", plain, "rate", false, true},
		{"denied by concurrency", busy, "concurrency", true, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			key := keyOf(t)
			if c.busy {
				release := hold(t, c.site, key)
				defer release()
			}
			exchanges, err := untilDenied(t, func(client *http.Client) error {
				return get(client, http.MethodPost, siteURLs[c.site]+"/v1/customers", key)
			})
			if err != nil {
				t.Fatal(err)
			}
			header := exchanges[0].header
			if _, ok := parse(t, header, "RateLimit-Policy")[c.limit]; !ok {
				t.Errorf("RateLimit-Policy: %q, want %q in it", header.Values("RateLimit-Policy"), c.limit)
			}
			limit, ok := parse(t, header, "RateLimit")[c.limit]
			if !ok || limit["r"] != int64(0) {
				t.Errorf("RateLimit: %q, want %q in it with r=0", header.Values("RateLimit"), c.limit)
			}
			seconds, timed := limit["t"].(int64)
			if timed != c.timed {
				t.Errorf("RateLimit: %q: is t there? %v, want %v", header.Values("RateLimit"), timed, c.timed)
			}
			if after, err := strconv.ParseInt(header.Get("Retry-After"), 10, 64); err != nil || after < max(1, seconds) {
				t.Errorf("Retry-After: %q, want at least 1 and never before t=%d", header.Get("Retry-After"), seconds)
			}
		})
	}
}

// parse returns the parameters of each name in the field, and fails the test if
// the field is not there or not what the draft says.
func parse(t *testing.T, header http.Header, field string) map[string]map[string]any {
	t.Helper()
	list, err := httpsfv.UnmarshalList(header.Values(field))
	if err != nil || len(list) == 0 {
		t.Errorf("%s: %q: %d items, error %v", field, header.Values(field), len(list), err)
	}
	parsed := make(map[string]map[string]any)
	for _, member := range list {
		item, ok := member.(httpsfv.Item)
		name, isString := item.Value.(string)
		if !ok || !isString {
			t.Errorf("%s: %q: item %v is not a string", field, header.Values(field), member)
			continue
		}
		params := make(map[string]any)
		for _, param := range item.Params.Names() {
			params[param], _ = item.Params.Get(param)
		}
		if _, twice := parsed[name]; twice {
			t.Errorf("%s: %q: %q is there twice", field, header.Values(field), name)
		}
		parsed[name] = params
	}
	return parsed
}
