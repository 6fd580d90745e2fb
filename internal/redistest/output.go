// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"bytes"
	"sync"
)

// Output collects what a process writes, while a test reads it. The zero Output
// is empty.
type Output struct {
	mu  sync.Mutex // guards below
	buf bytes.Buffer
}

// Write appends p. It never fails.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

// String returns all that was written.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// Reset forgets all that was written.
func (o *Output) Reset() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.buf.Reset()
}
