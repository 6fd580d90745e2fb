// SPDX-License-Identifier: Apache-2.0

package main

import (
	"syscall"
	"time"
)

// sleep blocks the thread: time.Sleep may oversleep by a millisecond.
func sleep(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil) // a signal wakes early: a request that is sent too soon
}
