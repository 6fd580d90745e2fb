// SPDX-License-Identifier: Apache-2.0

package marked

import (
	"strings"
	"testing"
)

func TestReplace(t *testing.T) {
	document := "a\n<!-- measured: x -->\nold\n<!-- measured: end -->\nb\n<!-- measured: y -->\n<!-- measured: end -->\nc\n"
	cases := []struct {
		name, want string
		bad        bool
	}{
		{"x", strings.Replace(document, "old", "new", 1), false},
		{"y", strings.Replace(document, "y -->\n", "y -->\nnew\n", 1), false},
		{"z", "", true},
	}
	for _, c := range cases {
		got, err := replace(document, c.name, "new\n\n")
		if got != c.want || (err != nil) != c.bad {
			t.Errorf("%s: got %q, %v, want %q", c.name, got, err, c.want)
		}
	}
	if got, err := replace("<!-- measured: x -->\nold\n", "x", "new"); err == nil {
		t.Errorf("without an end: got %q, want an error", got)
	}
}
