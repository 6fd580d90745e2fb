// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const modulePath = "github.com/stripe-ratelimit/caddy-stripe-ratelimit"

// arrows says what the packages of a folder may import besides the standard
// library: paths of this module as folders, others in full. A path stands for
// the folders below it too. The first row that matches counts.
var arrows = []struct {
	folder  string // as for path.Match
	imports []string
	http    bool // may import net/http
}{
	// The root knows go-redis for its options alone: a copy of them in limiters
	// would be a second one of what RedisConfig says already.
	{".", []string{"limiters", "shedding", "control", "internal/replay", "internal/safely", "github.com/caddyserver", "github.com/prometheus", "github.com/redis/go-redis/v9", "github.com/spf13/cobra", "go.opentelemetry.io/otel", "go.uber.org/zap"}, true},
	{"cmd/*", []string{".", "github.com/caddyserver"}, true},
	{"limiters", []string{"lua", "internal/safely", "github.com/redis/go-redis/v9"}, false},
	{"shedding", []string{"internal/safely"}, false},
	{"control", nil, false},
	{"lua", nil, false},
	{"internal/replay", []string{"limiters", "shedding"}, false},
	{"internal/safely", nil, false},
	{"internal/soak", []string{"limiters"}, false},
	{"internal/*", []string{"internal", "github.com/redis/go-redis/v9"}, true}, // harnesses: only tests import them
}

// brokenArrow says what is wrong with a file of the folder importing the
// package, or nothing.
func brokenArrow(folder, imported string) string {
	within := func(dir, of string) bool { return dir == of || strings.HasPrefix(dir, of+"/") }
	for _, row := range arrows {
		if ok, _ := path.Match(row.folder, folder); !ok {
			continue
		}
		if within(imported, "net/http") && !row.http {
			return "net/http belongs to the root package"
		}
		if first, _, _ := strings.Cut(imported, "/"); !strings.Contains(first, ".") {
			return "" // the standard library
		}
		if within(imported, modulePath) {
			imported = strings.TrimPrefix(strings.TrimPrefix(imported, modulePath), "/")
			if imported == "" {
				imported = "."
			}
		}
		for _, allowed := range row.imports {
			if within(imported, allowed) {
				return ""
			}
		}
		return "the arrow from " + folder + " to " + imported + " is not in the table"
	}
	return "the folder " + folder + " is not in the table"
}

// The arrows of the source point down: root, then limiters, shedding and
// internal, then lua; and only the root knows Caddy, Prometheus and net/http.
func TestArrows(t *testing.T) {
	files := 0
	err := filepath.WalkDir(".", func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if _, err := os.Stat(filepath.Join(file, "go.mod")); err == nil && file != "." {
				return filepath.SkipDir // a module of its own
			}
			if name := entry.Name(); file != "." && (name[0] == '.' || name == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			return nil
		}
		files++
		source, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, spec := range source.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if broken := brokenArrow(filepath.ToSlash(filepath.Dir(file)), imported); broken != "" {
				t.Errorf("%s imports %s: %s", file, imported, broken)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if files < 5 {
		t.Errorf("looked at %d files, want all of this module", files)
	}
}

func TestBrokenArrow(t *testing.T) {
	cases := []struct {
		name, folder, imported string
		broken                 bool
	}{
		{"the root may import the limiters", ".", modulePath + "/limiters", false},
		{"the root may not import Lua", ".", modulePath + "/lua", true},
		{"the root may import the replay", ".", modulePath + "/internal/replay", false},
		{"a harness is for tests", ".", modulePath + "/internal/redistest", true},
		{"a harness may use a harness", "internal/caddyproc", modulePath + "/internal/redistest", false},
		{"the limiters may import Redis", "limiters", "github.com/redis/go-redis/v9/maintnotifications", false},
		{"the limiters may not import Caddy", "limiters", "github.com/caddyserver/caddy/v2", true},
		{"the limiters may not import zap", "limiters", "go.uber.org/zap", true},
		{"the limiters may not import net/http", "limiters", "net/http", true},
		{"nor a part of it", "limiters", "net/http/httptrace", true},
		{"the limiters may import net", "limiters", "net", false},
		{"the limiters may not import the shedders", "limiters", modulePath + "/shedding", true},
		{"the shedders may not import the limiters", "shedding", modulePath + "/limiters", true},
		{"the shedders may not import Redis", "shedding", "github.com/redis/go-redis/v9", true},
		{"control may not import the limiters", "control", modulePath + "/limiters", true},
		{"lua may not look up", "lua", modulePath + "/limiters", true},
		{"a replay may import the limiters", "internal/replay", modulePath + "/limiters", false},
		{"a replay may not import the root", "internal/replay", modulePath, true},
		{"the command imports the root", "cmd/caddy", modulePath, false},
		{"a like-named module is another", "shedding", modulePath + "-fork/lua", true},
		{"a new folder needs a row", "util", "fmt", true},
	}
	for _, c := range cases {
		if got := brokenArrow(c.folder, c.imported); (got != "") != c.broken {
			t.Errorf("%s: brokenArrow(%q, %q) = %q, want broken: %v", c.name, c.folder, c.imported, got, c.broken)
		}
	}
}
