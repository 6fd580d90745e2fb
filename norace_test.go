// SPDX-License-Identifier: Apache-2.0

//go:build !race

package striperatelimit

const raceEnabled = false
