// SPDX-License-Identifier: Apache-2.0

// Package marked replaces parts of documents by what has been measured. A part
// stands between the lines "<!-- measured: NAME -->" and "<!-- measured: end -->".
package marked

import (
	"fmt"
	"os"
	"strings"
)

// Replace replaces the part of a name in a file.
func Replace(file, name, text string) error {
	old, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	document, err := replace(string(old), name, text)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return os.WriteFile(file, []byte(document), 0o644)
}

func replace(document, name, text string) (string, error) {
	begin, end := "<!-- measured: "+name+" -->\n", "<!-- measured: end -->"
	before, rest, found := strings.Cut(document, begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		return "", fmt.Errorf("no %q, or no %q after it", strings.TrimSpace(begin), end)
	}
	return before + begin + strings.TrimRight(text, "\n") + "\n" + end + after, nil
}
