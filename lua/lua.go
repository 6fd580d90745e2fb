// SPDX-License-Identifier: Apache-2.0

// Package lua holds the Redis scripts, one file each. The header of a script
// says what it takes and returns; tests hold the headers true.
package lua

import _ "embed"

// Admit decides every limit of one identity at once.
//
//go:embed admit.lua
var Admit string

// Renew renews leases of one concurrency limit of one identity.
//
//go:embed renew.lua
var Renew string
