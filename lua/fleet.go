// SPDX-License-Identifier: Apache-2.0

package lua

import _ "embed"

// FleetSync states what one instance of a fleet does and asks for slots.
//
//go:embed fleet_sync.lua
var FleetSync string
