// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// profile puts load on a scenario and writes a CPU profile of its Caddy, of
// whole seconds, to dir/<scenario>.pprof.
func (l *lab) profile(ctx context.Context, s scenario, length time.Duration, dir string) error {
	srv := l.servers[s.Setup]
	d, err := connect(s, srv.sites[s.Answer], l.seed)
	if err != nil {
		return err
	}
	defer d.close()
	seconds := math.Ceil(length.Seconds())
	loaded := make(chan error, 1)
	go func() {
		// Profiles end up to a tenth of a second late.
		_, err := d.run(ctx, time.Duration(seconds*float64(time.Second))+200*time.Millisecond)
		loaded <- err
	}()
	text, err := getProfile(ctx, fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%.0f", srv.admin, seconds))
	if err2 := <-loaded; err == nil {
		err = err2
	}
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, strings.ReplaceAll(s.String(), "/", "-")+".pprof"), text, 0o644)
}

func getProfile(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return io.ReadAll(resp.Body)
}
