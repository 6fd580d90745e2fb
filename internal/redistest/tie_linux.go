// SPDX-License-Identifier: Apache-2.0

package redistest

import (
	"os/exec"
	"syscall"
)

// TieToParent makes the kernel kill the command's process when this one dies,
// however it dies: a test binary that is killed or panics runs no cleanup.
func TieToParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
