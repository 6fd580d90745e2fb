// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestExpand(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "secret")
	if err := os.WriteFile(file, []byte("from a file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("EXPAND_SET", "s3cret{not.again}")
	t.Setenv("EXPAND_EMPTY", "")
	cases := []struct {
		text, want, err string // err: part of it
	}{
		{text: "", want: ""},
		{text: "plain", want: "plain"},
		{text: "{env.EXPAND_SET}", want: "s3cret{not.again}"},
		{text: "a{file." + file + "}b", want: "afrom a fileb"},
		{text: `hun\{ter\}2`, want: "hun{ter}2"},
		{text: "hunter2{", want: "hunter2{"},
		{text: "{env.EXPAND_EMPTY}", err: "{env.EXPAND_EMPTY} is empty"},
		{text: "hunter2{env.EXPAND_UNSET}", err: "{env.EXPAND_UNSET} is empty"},
		{text: "{file." + dir + "/none}", err: dir + "/none} is empty"},
		{text: "{evn.EXPAND_SET}", err: "neither {env.*} nor {file.*}"},
		{text: "{env.EXPAND_SET}{hunter2}", err: "neither {env.*} nor {file.*}"},
	}
	for _, c := range cases {
		got, err := expand(c.text)
		switch {
		case c.err == "" && (err != nil || got != c.want):
			t.Errorf("%s: got %q, %v, want %q", c.text, got, err, c.want)
		case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err) || strings.Contains(err.Error(), "hunter2")):
			t.Errorf("%s: got error %v, want one with %q and nothing of the secret", c.text, err, c.err)
		}
	}
}

// Configs share connections if they say the same, down to what is in the files.
func TestRedisConfig_Key(t *testing.T) {
	file := filepath.Join(t.TempDir(), "client.pem")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	key := func(address string) string {
		t.Helper()
		text, err := (&RedisConfig{Addresses: []string{address}, TLS: &RedisTLS{Cert: file, Key: file}}).key()
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	write("a certificate")
	before := key("a:1")
	if again := key("a:1"); again != before {
		t.Errorf("the same config: got %s and %s, want no difference", before, again)
	}
	if other := key("b:1"); other == before {
		t.Error("another address: got the same key")
	}
	write("a renewed certificate")
	if renewed := key("a:1"); renewed == before {
		t.Error("a certificate was renewed: got the same key")
	}
}
