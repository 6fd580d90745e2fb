// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"runtime/metrics"
	"syscall"

	"github.com/caddyserver/caddy/v2"
)

func init() { caddy.RegisterModule(usageAPI{}) }

// usage is what a process has used since it began.
type usage struct {
	CPU    float64 `json:"cpu"`    // us, of all threads, as the operating system counts
	Allocs float64 `json:"allocs"` // objects on the heap
	Bytes  float64 `json:"bytes"`  // allocated on the heap
}

func ownUsage() usage {
	samples := []metrics.Sample{
		{Name: "/gc/heap/allocs:objects"}, {Name: "/gc/heap/tiny/allocs:objects"}, {Name: "/gc/heap/allocs:bytes"},
	}
	metrics.Read(samples)
	return usage{
		CPU:    ownCPU(),
		Allocs: float64(samples[0].Value.Uint64() + samples[1].Value.Uint64()),
		Bytes:  float64(samples[2].Value.Uint64()),
	}
}

// ownCPU returns the CPU time of this process in us.
func ownCPU() float64 {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		panic(err) // the arguments are constant
	}
	us := func(t syscall.Timeval) float64 { return float64(t.Sec)*1e6 + float64(t.Usec) }
	return us(r.Utime) + us(r.Stime)
}

// usageAPI is a route of Caddy's admin API that tells the usage of its process.
type usageAPI struct{}

const usagePath = "/benchmark/usage"

func (usageAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.benchmark", New: func() caddy.Module { return usageAPI{} }}
}

func (usageAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{{
		Pattern: usagePath,
		Handler: caddy.AdminHandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			return json.NewEncoder(w).Encode(ownUsage())
		}),
	}}
}
