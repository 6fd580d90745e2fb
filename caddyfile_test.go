// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var update = flag.Bool("update", false, "write what the adapter says into testdata/adapt")

// line parts the two halves of a golden file.
const line = "----------\n"

// TestAdapt adapts the Caddyfile in the upper part of each golden file. The
// lower part is the whole result: JSON, or the text of the error.
func TestAdapt(t *testing.T) {
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		t.Fatalf("golden files: got %v, %v", files, err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".caddyfiletest")
		t.Run(name, func(t *testing.T) {
			golden, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			input, want, _ := strings.Cut(string(golden), line)
			got := adaptText(t, input)
			if isError := !strings.HasPrefix(got, "{"); isError != strings.HasPrefix(name, "error_") {
				t.Fatalf("the name of %s does not fit its outcome: %s", file, got)
			}
			if *update {
				if err := os.WriteFile(file, []byte(input+line+got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("adapted %s (-want +got):\n%s", file, diff)
			}
		})
	}
}

// TestAdapt_Loads tests that what the adapter makes of the golden files, apart
// from those that read files of the host, can be loaded.
func TestAdapt_Loads(t *testing.T) {
	for _, name := range []string{"REDIS_PASSWORD", "SENTINEL_PASSWORD", "RATELIMIT_SECRET", "LOAD_HOST"} {
		t.Setenv(name, "secret")
	}
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		golden, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, adapted, _ := strings.Cut(string(golden), line)
		if !strings.HasPrefix(adapted, "{") || strings.Contains(adapted, "/etc/") || strings.Contains(adapted, "{file.") {
			continue
		}
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			var config caddy.Config
			if err := caddy.StrictUnmarshalJSON([]byte(adapted), &config); err != nil {
				t.Fatal(err)
			}
			if err := caddy.Validate(&config); err != nil {
				t.Error(err)
			}
		})
	}
}

// adaptText returns what the Caddyfile adapts to: indented JSON, or an error.
// The adapter's warnings, of bad formatting for example, are failures.
func adaptText(t *testing.T, input string) string {
	t.Helper()
	result, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(input), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return err.Error() + "\n"
	}
	for _, w := range warnings {
		t.Errorf("warning: %v", w)
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, result, "", "\t"); err != nil {
		t.Fatal(err)
	}
	return indented.String() + "\n"
}

// FuzzCaddyfile feeds tokens to both grammars.
func FuzzCaddyfile(f *testing.F) {
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		golden, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		input, _, _ := strings.Cut(string(golden), line)
		if _, block, ok := strings.Cut(input, "\tstripe_ratelimit"); ok {
			f.Add("stripe_ratelimit" + block)
		}
	}
	f.Fuzz(func(t *testing.T, input string) {
		tokens, err := caddyfile.Tokenize([]byte(input), "Caddyfile")
		if err != nil || len(tokens) == 0 {
			t.Skip()
		}
		if h := testUnmarshalCaddyfile[Handler](t, tokens); h != nil {
			testProvision(t, h, new(App))
		}
		if app := testUnmarshalCaddyfile[App](t, tokens); app != nil {
			testProvision(t, &Handler{Concurrency: []*ConcurrencyLimit{{Capacity: 1}}}, app)
		}
	})
}

// testProvision tests that provisioning a config, without starting it, does not
// panic. Much that the grammar accepts is refused here, such as placeholders that are
// empty and pools without what they need.
func testProvision(t *testing.T, h *Handler, app *App) {
	t.Helper()
	raw := func(v any) json.RawMessage {
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	handler := caddyconfig.JSONModuleObject(h, "handler", "stripe_ratelimit", nil)
	_ = caddy.Validate(&caddy.Config{
		Admin:   &caddy.AdminConfig{Disabled: true},
		Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{"default": {BaseLog: caddy.BaseLog{WriterRaw: raw(map[string]string{"output": "discard"})}}}},
		AppsRaw: caddy.ModuleMap{
			"stripe_ratelimit": raw(app),
			"http": raw(map[string]any{"servers": map[string]any{"a": map[string]any{
				"listen": []string{"127.0.0.1:0"}, "automatic_https": map[string]bool{"disable": true},
				"routes": []any{map[string]any{"handle": []json.RawMessage{handler}}},
			}}}),
		},
	})
}

// testUnmarshalCaddyfile tests that the grammar of T does not panic, that its
// errors have a line, and that what it accepts is valid, survives JSON and is
// the same again, and returns that.
func testUnmarshalCaddyfile[T any, P interface {
	*T
	caddyfile.Unmarshaler
	validateConfig() error
}](t *testing.T, tokens []caddyfile.Token) P {
	t.Helper()
	adapted := P(new(T))
	if err := adapted.UnmarshalCaddyfile(caddyfile.NewDispenser(tokens)); err != nil {
		if !strings.Contains(err.Error(), ", at Caddyfile:") {
			t.Errorf("error without file and line: %v", err)
		}
		return nil
	}
	text, err := json.Marshal(adapted)
	if err != nil {
		t.Fatalf("marshal: %v", err)
	}
	loaded := P(new(T))
	if err := caddy.StrictUnmarshalJSON(text, loaded); err != nil {
		t.Fatalf("load %s: %v", text, err)
	}
	if diff := cmp.Diff(adapted, loaded, cmpopts.IgnoreUnexported(Handler{}, App{})); diff != "" {
		t.Errorf("through JSON (-adapted +loaded):\n%s", diff)
	}
	if err := loaded.validateConfig(); err != nil {
		t.Errorf("adapted to %s, which is not valid: %v", text, err)
	}
	return loaded
}
