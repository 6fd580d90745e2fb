// SPDX-License-Identifier: Apache-2.0

// Package shedding holds the two load shedders of Stripe's post "Scaling your
// API with rate limiters" and the order in which they give up traffic. It knows
// no HTTP, no Caddy and no Redis.
package shedding

// Criticality ranks requests by how late they are shed. The zero value is no
// criticality.
type Criticality uint8

// The classes, from the first to be shed to the one that never is.
const (
	TestMode Criticality = iota + 1 // no money moves
	Get                             // reads
	Post                            // writes
	Critical                        // what the business cannot do without
)

// String returns the word that config, metrics and placeholders use.
func (c Criticality) String() string {
	switch c {
	case TestMode:
		return "test_mode"
	case Get:
		return "get"
	case Post:
		return "post"
	case Critical:
		return "critical"
	}
	return "unknown"
}
