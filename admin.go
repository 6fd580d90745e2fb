// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func init() {
	caddy.RegisterModule(new(adminAPI))
}

// adminBase is where the admin API has all that is ours.
const adminBase = "/stripe_ratelimit/"

// Bounds of the admin API.
const (
	maxAdminBody = 128 << 10 // an identity may be long

	// changeTimeout is how long a change waits for the store, to say whether it
	// is in force everywhere.
	changeTimeout = 2 * time.Second
)

// adminAPI shows and controls the pools of this process, those of all configs:
// it asks what outlives configs and not the config that it was made for. See
// docs/admin-api.md.
type adminAPI struct{}

// CaddyModule returns the Caddy module information.
func (*adminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.stripe_ratelimit", New: func() caddy.Module { return new(adminAPI) }}
}

// Routes implements caddy.AdminRouter.
func (a *adminAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{Pattern: adminBase, Handler: caddy.AdminHandlerFunc(a.serve)}}
}

// endpoint answers one request whose body is in. What it returns is encoded.
type endpoint func(ctx context.Context, r *http.Request) (any, error)

// endpoints are all there are, by path and method.
var endpoints = map[string]map[string]endpoint{
	"status":       {http.MethodGet: getStatus},
	"switches":     {http.MethodGet: listSwitches, http.MethodPost: setSwitch, http.MethodDelete: clearSwitch},
	"overrides":    {http.MethodGet: listOverrides, http.MethodPost: setOverride, http.MethodDelete: clearOverride},
	"keys/inspect": {http.MethodPost: inspectKey},
	"keys/reset":   {http.MethodPost: resetKey},
}

func (*adminAPI) serve(w http.ResponseWriter, r *http.Request) error {
	path := strings.TrimPrefix(r.URL.Path, adminBase)
	methods, ok := endpoints[path]
	if !ok {
		return adminError(http.StatusNotFound, "there is no %q; there are %s", r.URL.Path, list(endpoints, adminBase))
	}
	serve, ok := methods[r.Method]
	if !ok {
		allowed := list(methods, "")
		w.Header().Set("Allow", allowed)
		return adminError(http.StatusMethodNotAllowed, "%s is not a method of %s; there are %s", r.Method, r.URL.Path, allowed)
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxAdminBody)
	ctx, cancel := context.WithTimeout(r.Context(), changeTimeout)
	defer cancel()
	answer, err := serve(ctx, r)
	if err != nil {
		return err
	}
	text, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if c, ok := answer.(changeAnswer); ok && c.Pending != "" {
		w.WriteHeader(http.StatusAccepted)
	}
	_, _ = w.Write(append(text, '\n'))
	return nil
}

// list names the keys of a map in order.
func list[V any](m map[string]V, prefix string) string {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, prefix+name)
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

func adminError(code int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: code, Err: fmt.Errorf(format, args...)}
}

// badRequest is the error of a request that makes no sense.
func badRequest(err error) error {
	return caddy.APIError{HTTPStatus: http.StatusBadRequest, Err: err}
}

// decodeBody reads the body of a request into v. What it does not know is an error,
// because a name that is misspelt must not widen what a switch is for.
func decodeBody(r *http.Request, v any) error {
	// A page in a browser cannot send this type to another origin unasked.
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != "application/json" {
		return adminError(http.StatusUnsupportedMediaType, "the body must be JSON, with Content-Type: application/json")
	}
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	err := decoder.Decode(v)
	if err == nil {
		if _, more := decoder.Token(); more != io.EOF {
			err = errors.New("something follows the JSON object")
		}
	}
	var large *http.MaxBytesError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &large):
		return adminError(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", large.Limit)
	case errors.Is(err, io.EOF):
		return badRequest(errors.New("the body is empty; it must be a JSON object"))
	}
	return badRequest(fmt.Errorf("the body is no such JSON object: %w", err))
}

// Interface guards
var (
	_ caddy.Module      = (*adminAPI)(nil)
	_ caddy.AdminRouter = (*adminAPI)(nil)
)
