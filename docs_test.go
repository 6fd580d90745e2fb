// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// secretsDir is where the documentation keeps secrets.
const secretsDir = "/run/secrets/"

// Every snippet of the documentation is formatted, adapts and starts (short of
// Start), and the JSON that is shown beside a Caddyfile is what that adapts to.
func TestDocs_Snippets(t *testing.T) {
	secrets := writeSecrets(t)
	t.Setenv("REDIS_ADDR", "localhost:6379")
	t.Setenv("REDIS_PASSWORD", "redis password")
	t.Setenv("RATELIMIT_SECRET", "0123456789abcdef0123456789abcdef")
	for file, text := range readDocs(t) {
		var adapted []byte
		for _, block := range fencedBlocks(text) {
			name := fmt.Sprintf("%s:%d", file, block.line)
			switch block.language {
			case "caddyfile":
				t.Run(name, func(t *testing.T) {
					if formatted := string(caddyfile.Format([]byte(block.text))); formatted != block.text {
						t.Errorf("not as caddy fmt has it (-want +got):\n%s", cmp.Diff(formatted, block.text))
					}
					adapted = validate(t, strings.ReplaceAll(wholeCaddyfile(block.text), secretsDir, secrets))
				})
			case "json":
				if adapted == nil { // not beside a Caddyfile: of the admin API
					continue
				}
				t.Run(name, func(t *testing.T) { compareJSON(t, block.text, adapted) })
			}
		}
	}
}

// What the documentation names exists, and every metric is documented.
func TestDocs_Names(t *testing.T) {
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		for _, c := range collectors {
			c.Describe(descs)
		}
	}()
	var known string
	readme := readFile(t, "README.md")
	name := regexp.MustCompile(`"caddy_stripe_ratelimit_([a-z_]+)"`)
	for desc := range descs {
		known += desc.String()
		if m := name.FindStringSubmatch(desc.String()); m == nil || !strings.Contains(readme, "`"+m[1]+"`") {
			t.Errorf("README.md: the table of metrics lacks %v", desc)
		}
	}
	metric := regexp.MustCompile(`caddy_stripe_ratelimit_[a-z_]*[a-z]`)
	link := regexp.MustCompile(`\]\(([^)#]+)(#[^)]*)?\)`)
	for file, text := range readDocs(t) {
		for _, name := range metric.FindAllString(text, -1) {
			if !strings.Contains(known, `"`+name+`"`) {
				t.Errorf("%s: there is no metric %s", file, name)
			}
		}
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(file), m[1])); err != nil {
				t.Errorf("%s: link to nowhere: %v", file, err)
			}
		}
	}
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// readDocs returns README.md and docs/*.md by their names.
func readDocs(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("docs/*.md")
	if err != nil || len(files) == 0 {
		t.Fatalf("docs: got %q, %v", files, err)
	}
	docs := map[string]string{}
	for _, f := range append(files, "README.md") {
		docs[f] = readFile(t, f)
	}
	return docs
}

type fencedBlock struct {
	language, text string
	line           int
}

func fencedBlocks(markdown string) (blocks []fencedBlock) {
	var open *fencedBlock
	for i, line := range strings.Split(markdown, "\n") {
		language, fence := strings.CutPrefix(line, "```")
		switch {
		case open == nil && fence:
			open = &fencedBlock{language: language, line: i + 1}
		case open != nil && fence:
			blocks = append(blocks, *open)
			open = nil
		case open != nil:
			open.text += line + "\n"
		}
	}
	return blocks
}

// wholeCaddyfile puts a snippet of directives into a site.
func wholeCaddyfile(snippet string) string {
	for line := range strings.Lines(snippet) {
		word, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case word == "" || word[0] == '#':
			continue
		case strings.ContainsAny(word, "{(:."): // global options, a snippet or a site
			return snippet
		}
		break
	}
	return ":8080 {\n" + snippet + "}\n"
}

// validate adapts a Caddyfile and provisions what comes out. It returns that.
func validate(t *testing.T, text string) []byte {
	t.Helper()
	adapted, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		t.Fatalf("adapt: %v\n%s", err, text)
	}
	for _, w := range warnings {
		if !strings.Contains(w.Message, "not formatted") { // because of the site around a snippet
			t.Errorf("adapt: warning: %v", w)
		}
	}
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(adapted, &cfg); err != nil {
		t.Fatal(err)
	}
	if err := caddy.Validate(&cfg); err != nil {
		t.Errorf("validate: %v\n%s", err, text)
	}
	return adapted
}

// compareJSON checks the JSON of our handler, or else of our app, against the
// config that the Caddyfile above it was adapted to.
func compareJSON(t *testing.T, documented string, adapted []byte) {
	t.Helper()
	var module any = new(App)
	ours := func(m map[string]any) any { return m["stripe_ratelimit"] }
	if strings.Contains(documented, `"handler"`) {
		module = new(Handler)
		ours = func(m map[string]any) any {
			if m["handler"] != "stripe_ratelimit" {
				return nil
			}
			return m
		}
	}
	var config any
	if err := json.Unmarshal(adapted, &config); err != nil {
		t.Fatalf("the Caddyfile above: %v", err)
	}
	want, err := json.Marshal(find(config, ours))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(normal(t, module, want), normal(t, module, []byte(documented))); diff != "" {
		t.Errorf("differs from the Caddyfile above it (-adapted +documented):\n%s", diff)
	}
}

// find returns the first of what pick makes of the objects in a JSON value.
func find(v any, pick func(map[string]any) any) any {
	var inner []any
	switch v := v.(type) {
	case map[string]any:
		if found := pick(v); found != nil {
			return found
		}
		inner = slices.Collect(maps.Values(v))
	case []any:
		inner = v
	}
	for _, e := range inner {
		if found := find(e, pick); found != nil {
			return found
		}
	}
	return nil
}

// normal is the JSON of a module as the module itself would write it.
func normal(t *testing.T, module any, text []byte) (normal any) {
	t.Helper()
	text = regexp.MustCompile(`"handler":\s*"stripe_ratelimit",?`).ReplaceAll(text, nil)
	m := reflect.New(reflect.TypeOf(module).Elem()).Interface()
	if err := caddy.StrictUnmarshalJSON(text, m); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &normal); err != nil {
		t.Fatal(err)
	}
	return normal
}

// writeSecrets makes the files that the documentation has under secretsDir.
func writeSecrets(t *testing.T) (dir string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})

	dir = t.TempDir() + "/"
	for name, content := range map[string][]byte{
		"redis_password":    []byte("redis password"),
		"sentinel_password": []byte("sentinel password"),
		"ratelimit_key":     []byte("0123456789abcdef0123456789abcdef"),
		"redis_ca.pem":      certPEM,
		"redis_client.pem":  certPEM,
		"redis_client.key":  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	} {
		if err := os.WriteFile(dir+name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
