// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"context"
	"errors"
	"net/http"
	"testing"

	stripe81 "github.com/stripe/stripe-go/v81"
	"github.com/stripe/stripe-go/v81/customer"
	stripe86 "github.com/stripe/stripe-go/v86"
)

// stripeError is what stripe-go tells of an error of the API.
type stripeError struct {
	Status                         int
	Code, Type, DocURL, Msg, ReqID string
}

// stripeGo are the versions: each makes a customer, with its default retries.
var stripeGo = []struct {
	name   string
	create func(client *http.Client, url, key string) error
	error  func(error) (stripeError, bool)
}{
	{
		"v81",
		func(client *http.Client, url, key string) error {
			backend := stripe81.GetBackendWithConfig(stripe81.APIBackend, &stripe81.BackendConfig{
				URL: &url, HTTPClient: client,
				LeveledLogger: &stripe81.LeveledLogger{Level: stripe81.LevelNull},
			})
			_, err := customer.Client{B: backend, Key: key}.New(&stripe81.CustomerParams{})
			return err
		},
		func(err error) (stripeError, bool) {
			var e *stripe81.Error
			if !errors.As(err, &e) {
				return stripeError{}, false
			}
			return stripeError{e.HTTPStatusCode, string(e.Code), string(e.Type), e.DocURL, e.Msg, e.RequestID}, true
		},
	},
	{
		"v86",
		func(client *http.Client, url, key string) error {
			backends := stripe86.NewBackendsWithConfig(&stripe86.BackendConfig{
				URL: &url, HTTPClient: client,
				LeveledLogger: &stripe86.LeveledLogger{Level: stripe86.LevelNull},
			})
			api := stripe86.NewClient(key, stripe86.WithBackends(backends))
			_, err := api.V1Customers.Create(context.Background(), &stripe86.CustomerCreateParams{})
			return err
		},
		func(err error) (stripeError, bool) {
			var e *stripe86.Error
			if !errors.As(err, &e) {
				return stripeError{}, false
			}
			return stripeError{e.HTTPStatusCode, string(e.Code), string(e.Type), e.DocURL, e.Msg, e.RequestID}, true
		},
	},
}

// A denied call is an error of its own kind at once: no retries that would only
// be denied too.
func TestStripeGo_Denied(t *testing.T) {
	cases := []struct {
		name   string
		site   int
		docURL string
	}{
		{"as Stripe does it", plain, "https://example.com/errors#rate-limit"},
		{"should_retry auto and a long wait", long, ""},
	}
	for _, version := range stripeGo {
		for _, c := range cases {
			t.Run(version.name+" "+c.name, func(t *testing.T) {
				key := keyOf(t)
				exchanges, err := untilDenied(t, func(client *http.Client) error {
					return version.create(client, siteURLs[c.site], key)
				})
				if len(exchanges) != 1 {
					t.Errorf("tried %d times, want once", len(exchanges))
				}
				e, ok := version.error(err)
				if !ok {
					t.Fatalf("got error %#v, want a *stripe.Error", err)
				}
				if e.Status != http.StatusTooManyRequests || e.Code != "rate_limit" || e.Type != "invalid_request_error" || e.DocURL != c.docURL {
					t.Errorf("got %+v, want status 429, code rate_limit, type invalid_request_error, doc URL %q", e, c.docURL)
				}
				if e.Msg == "" || e.ReqID == "" {
					t.Errorf("got %+v, want a message and a request id", e)
				}
			})
		}
	}
}

// With should_retry auto v81 waits and succeeds. v86 ignores the header (a
// regression of v82.1.0), and shows its caller the error.
func TestStripeGo_ShouldRetry(t *testing.T) {
	for _, version := range stripeGo {
		t.Run(version.name, func(t *testing.T) {
			key := keyOf(t)
			exchanges, err := untilDenied(t, func(client *http.Client) error {
				return version.create(client, siteURLs[retried], key)
			})
			if got := exchanges[0].header.Get("Stripe-Should-Retry"); got != "true" {
				t.Errorf("Stripe-Should-Retry: %q, want true", got)
			}
			switch version.name {
			case "v81":
				if last := exchanges[len(exchanges)-1]; err != nil || len(exchanges) < 2 || last.status != http.StatusOK {
					t.Errorf("got error %v after %d tries, want none after more than one", err, len(exchanges))
				}
			case "v86":
				if e, ok := version.error(err); !ok || e.Status != http.StatusTooManyRequests || e.Code != "rate_limit" {
					t.Errorf("got error %v, want a *stripe.Error 429 rate_limit", err)
				}
			}
		})
	}
}

// A concurrency limit's denial is the same kind of error.
func TestStripeGo_ConcurrencyDenied(t *testing.T) {
	for _, version := range stripeGo {
		t.Run(version.name, func(t *testing.T) {
			key := keyOf(t)
			release := hold(t, busy, key)
			defer release()
			rec := new(recorder)
			err := version.create(rec.client(), siteURLs[busy], key)
			if e, ok := version.error(err); !ok || e.Status != http.StatusTooManyRequests || e.Code != "rate_limit" {
				t.Errorf("got error %v, want a *stripe.Error 429 rate_limit", err)
			}
			if got := rec.statuses(); len(got) != 1 {
				t.Errorf("got statuses %v, want one try", got)
			}
		})
	}
}

// What an error says to a client when the fault is not its own, by site.
var unavailable = map[int]string{
	closed: "limiter_unavailable",
	full:   "overloaded",
}

// A 503 of ours is an error of the API's own kind.
func TestStripeGo_Unavailable(t *testing.T) {
	for _, version := range stripeGo {
		for site, code := range unavailable {
			t.Run(version.name+" "+code, func(t *testing.T) {
				err := version.create(new(recorder).client(), siteURLs[site], keyOf(t))
				e, ok := version.error(err)
				if !ok || e.Status != http.StatusServiceUnavailable || e.Code != code || e.Type != "api_error" {
					t.Errorf("got error %v, want a *stripe.Error 503 %s", err, code)
				}
			})
		}
	}
}
