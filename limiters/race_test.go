// SPDX-License-Identifier: Apache-2.0

//go:build race

package limiters

// raceEnabled tells tests that count allocations to stand back.
const raceEnabled = true
