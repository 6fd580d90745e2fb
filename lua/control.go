// SPDX-License-Identifier: Apache-2.0

package lua

import _ "embed"

// Control registers an instance and shares switches and overrides.
//
//go:embed control.lua
var Control string
