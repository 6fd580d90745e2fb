// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/internal/safely"
)

func init() {
	caddy.RegisterModule(InFlight{})
	caddy.RegisterModule(new(Probe))
}

// UtilizationSource is a guest module in the namespace
// `stripe_ratelimit.utilization`: a measure of how busy an instance is.
type UtilizationSource interface {
	// Utilization returns 0 for idle, 1 for full, more for too much, and NaN
	// where it is not known, which changes nothing. It is called once a second,
	// by the running config alone, and must not block.
	Utilization() float64
}

const utilizationNamespace = "stripe_ratelimit.utilization."

// utilizationInFlight names the default source.
const utilizationInFlight = "in_flight"

// InFlight is the default measure: the requests in progress of those that the
// instance can serve at once.
type InFlight struct{}

// CaddyModule returns the Caddy module information.
func (InFlight) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: utilizationNamespace + utilizationInFlight, New: func() caddy.Module { return new(InFlight) }}
}

// UnmarshalCaddyfile reads `in_flight`, which has no arguments.
func (*InFlight) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if d.Next() {
		return d.Errf("unexpected '%s' after utilization in_flight, which takes nothing", d.Val())
	}
	return nil
}

const (
	probeEvery = time.Second
	probeStale = 3 * time.Second // one answer may be missed, and one be late

	// probeAnswer bounds what is read of an answer.
	probeAnswer = 64 << 10
)

// Probe asks an HTTP endpoint once a second how busy the instance is. A probe
// that fails, or has not answered for three seconds, changes nothing: the
// shedder stays at its level.
type Probe struct {
	// The address to ask. `{env.*}` and `{file.*}` are replaced. Required.
	URL string `json:"url,omitempty"`

	// Where in a JSON answer the number is, as a JSON pointer such as
	// `/cpu/0/busy` (default: the whole answer is the number).
	Pointer string `json:"pointer,omitempty"`

	ctx    context.Context
	logger *zap.Logger
	start  sync.Once
	last   atomic.Pointer[reading]
	log    everySecond
}

// reading is the last answer of a probe.
type reading struct {
	utilization float64
	at          time.Time
}

// CaddyModule returns the Caddy module information.
func (*Probe) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: utilizationNamespace + "probe", New: func() caddy.Module { return new(Probe) }}
}

// Provision checks the config. It asks nobody yet.
func (p *Probe) Provision(ctx caddy.Context) error {
	p.ctx, p.logger = ctx, ctx.Logger()
	var err error
	if p.URL, err = expand(p.URL); err != nil {
		return fmt.Errorf("url: %w", err)
	}
	return p.validate()
}

func (p *Probe) validate() error {
	// An address may hold a password: errors do not quote it.
	if u, err := url.Parse(p.URL); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return errors.New("the URL of utilization probe is not an http:// or https:// address")
	}
	if p.Pointer != "" && p.Pointer[0] != '/' {
		return fmt.Errorf("the JSON pointer '%s' of utilization probe does not begin with a slash, such as /busy", p.Pointer)
	}
	return nil
}

// UnmarshalCaddyfile reads
//
//	probe <url> [<json pointer>]
func (p *Probe) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	args := d.RemainingArgs()
	switch {
	case d.Next():
		return d.Errf("unexpected '%s' after utilization probe; it takes a URL and a JSON pointer", d.Val())
	case len(args) == 0 || args[0] == "":
		return d.Err("utilization probe needs a URL, such as probe http://localhost:9000/load /busy; from {$VAR} there is none where VAR is not set")
	case len(args) > 2:
		return d.Errf("unexpected '%s' after utilization probe; it takes a URL and a JSON pointer", args[2])
	}
	p.URL = args[0]
	if len(args) == 2 {
		p.Pointer = args[1]
	}
	if strings.Contains(p.URL, "{") { // checked once it is replaced
		return nil
	}
	if err := p.validate(); err != nil {
		return d.WrapErr(err)
	}
	return nil
}

// Utilization implements UtilizationSource. The first call starts the probing,
// which ends with the config.
func (p *Probe) Utilization() float64 {
	p.start.Do(func() { go p.run() })
	return p.utilizationAt(time.Now())
}

func (p *Probe) utilizationAt(now time.Time) float64 {
	if r := p.last.Load(); r != nil && now.Sub(r.at) <= probeStale {
		return r.utilization
	}
	return math.NaN()
}

func (p *Probe) run() {
	client := &http.Client{Timeout: probeEvery, Transport: &http.Transport{DisableCompression: true}}
	defer client.CloseIdleConnections()
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for {
		_ = safely.Do("utilization", func() { p.ask(client) })
		select {
		case <-p.ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (p *Probe) ask(client *http.Client) {
	utilization, err := p.fetch(client)
	if err == nil {
		p.last.Store(&reading{utilization, time.Now()})
		return
	}
	if more, ok := p.log.allow(time.Now()); ok && p.ctx.Err() == nil {
		p.logger.Warn("probe failed; the shedder stays at its level", zap.Error(err), zap.Int64("failures_not_logged", more))
	}
}

func (p *Probe) fetch(client *http.Client) (float64, error) {
	req, err := http.NewRequestWithContext(p.ctx, http.MethodGet, p.URL, nil)
	if err != nil {
		return 0, err
	}
	res, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, probeAnswer+1))
	if err != nil {
		return 0, err
	}
	if len(body) > probeAnswer {
		return 0, fmt.Errorf("answer is longer than %d bytes", probeAnswer)
	}
	if res.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("answer has status %d", res.StatusCode)
	}
	return readUtilization(body, p.Pointer)
}

// readUtilization returns the number in an answer.
func readUtilization(answer []byte, pointer string) (float64, error) {
	text := strings.TrimSpace(string(answer))
	if pointer != "" {
		var doc any
		if err := json.Unmarshal(answer, &doc); err != nil {
			return 0, errors.New("answer is not JSON")
		}
		number, ok := at(doc, pointer).(float64)
		if !ok {
			return 0, fmt.Errorf("answer has no number at %s", pointer)
		}
		text = strconv.FormatFloat(number, 'g', -1, 64)
	}
	u, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(u) || math.IsInf(u, 0) || u < 0 {
		return 0, errors.New("answer is not a number of at least 0")
	}
	return u, nil
}

var unescapePointer = strings.NewReplacer("~1", "/", "~0", "~")

// at returns what a JSON pointer (RFC 6901) points to, nil if nothing.
func at(doc any, pointer string) any {
	for _, token := range strings.Split(pointer, "/")[1:] {
		token = unescapePointer.Replace(token)
		switch node := doc.(type) {
		case map[string]any:
			doc = node[token]
		case []any:
			i, err := strconv.Atoi(token)
			if err != nil || i < 0 || i >= len(node) {
				return nil
			}
			doc = node[i]
		default:
			return nil
		}
	}
	return doc
}

// Interface guards
var (
	_ UtilizationSource     = (*Probe)(nil)
	_ caddy.Provisioner     = (*Probe)(nil)
	_ caddyfile.Unmarshaler = (*Probe)(nil)
	_ caddyfile.Unmarshaler = (*InFlight)(nil)
)
