// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"testing"
)

// The plot in the documentation is what the code does now.
func TestPlot_IsInTheDocumentation(t *testing.T) {
	const file = "../../docs/workers.svg"
	want, err := drawIncident(simulate())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s is not what the code draws (%v); run: make plots", file, err)
	}
}
