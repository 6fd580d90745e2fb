// SPDX-License-Identifier: Apache-2.0

package safely

import (
	"errors"
	"strings"
	"testing"
)

func TestDo(t *testing.T) {
	var reported []*Bug
	Report = func(b *Bug) { reported = append(reported, b) }
	defer func() { Report = func(*Bug) {} }()

	done := false
	if err := Do("work", func() { done = true }); err != nil || !done || len(reported) != 0 {
		t.Errorf("work without a bug: done %v, error %v, %d reports; want true, nil, 0", done, err, len(reported))
	}
	err := Do("work", func() { panic("thrown") })
	if err == nil || err.Error() != "panic in work: thrown" {
		t.Errorf("got error %v, want panic in work: thrown", err)
	}
	if len(reported) != 1 || !strings.Contains(string(reported[0].Stack), "safely.TestDo") {
		t.Errorf("%d reports, want one with the stack of the bug", len(reported))
	}
}

func TestDo_ReportPanics(t *testing.T) {
	Report = func(*Bug) { panic("in the report") }
	defer func() { Report = func(*Bug) {} }()
	if err := Do("work", func() { panic("thrown") }); err == nil {
		t.Error("got no error")
	}
}

type worse struct{}

func (worse) Error() string { panic("in Error") }

func TestDescribe(t *testing.T) {
	cases := []struct {
		name   string
		thrown any
		want   string
	}{
		{"text", "bug", "bug"},
		{"error", errors.New("bug"), "bug"},
		{"an error that panics", worse{}, "%!v(PANIC=Error method: in Error)"},
		{"a value with a secret", struct{ Key string }{"sk_live_1"}, "struct { Key string }"},
		{"long text", strings.Repeat("a", 1000), strings.Repeat("a", 500) + "…"},
	}
	for _, c := range cases {
		if got := Describe(c.thrown); got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
}
