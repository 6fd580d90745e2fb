// SPDX-License-Identifier: Apache-2.0

// Package safely keeps a bug of this module from ending the process or a
// request: the one place that recovers from panics outside of requests.
package safely

import (
	"fmt"
	"runtime/debug"
)

// Bug is a panic that was caught.
type Bug struct { //nolint:errname // an error only on its way to who counts it
	Where string // of a fixed set: what was being done
	Value string // what was thrown, as Describe tells it
	Stack []byte
}

// Error implements error. It has no stack in it, which belongs into one log line.
func (b *Bug) Error() string { return "panic in " + b.Where + ": " + b.Value }

// Report is told of every bug. It is set once, before anything runs.
var Report = func(*Bug) {}

// Do does work and returns nil, or the Bug in it. Locks are the work's own to
// unlock, by defer.
func Do(where string, work func()) (bug error) {
	defer func() {
		if p := recover(); p != nil {
			caught := &Bug{Where: where, Value: Describe(p), Stack: debug.Stack()}
			bug = caught
			defer func() { _ = recover() }() // the report may be the culprit
			Report(caught)
		}
	}()
	work()
	return nil
}

// maxDescription bounds what a log line tells of a panic, in bytes.
const maxDescription = 500

// Describe says what was thrown. It tells only the type of what is neither text
// nor an error: in a value there may be a whole request with its keys.
func Describe(p any) string {
	switch p.(type) {
	case error, string, fmt.Stringer:
	default:
		return fmt.Sprintf("%T", p)
	}
	text := fmt.Sprint(p)
	if len(text) > maxDescription {
		text = text[:maxDescription] + "…"
	}
	return text
}
