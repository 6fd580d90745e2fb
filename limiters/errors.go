// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
)

var (
	// errShape is returned for a reply that is not what the script promises.
	errShape = errors.New("reply of an unexpected shape")

	// errLate is returned when the server came to a call only after its
	// deadline. Nothing was taken.
	errLate = errors.New("the server came to it too late")

	// errBreakerOpen is returned for a call that was not made, because its node
	// was known to fail.
	errBreakerOpen = errors.New("not called, because it fails")

	// errPanic is returned for a bug of ours, wherever it was caught.
	errPanic = errors.New("panic")
)

// answeredError is what a script answers about one of the identities that it was
// called about, as it would be answered if there were no others.
type answeredError string

func (e answeredError) Error() string { return string(e) }

// RedisError makes it a redis.Error.
func (answeredError) RedisError() {}

// mayHaveRun reports whether a call that failed may have taken something, now
// or until its deadline. A server that answers with an error has not: the
// scripts check everything before they write.
func mayHaveRun(err error) bool {
	_, answered := errors.AsType[redis.Error](err)
	return !answered && !errors.Is(err, errLate) && !errors.Is(err, errBreakerOpen) && !isDial(err) &&
		!errors.Is(err, redis.ErrClosed) && !errors.Is(err, redis.ErrPoolTimeout)
}

// nodeFailed reports whether an error is the fault of the node, so that other calls
// fail as well, and not that of one call, of a key or of whoever waited.
func nodeFailed(err error) bool {
	switch Reason(err) {
	case "timeout", "connection", "loading", "readonly", "oom", "auth":
		return true
	case "busy":
		return !isScriptKill(err)
	case "cluster":
		return redis.HasErrorPrefix(err, "CLUSTERDOWN")
	}
	return false
}

// isScriptKill reports whether somebody ended the script that kept a server busy:
// one call has failed, and the next will not.
func isScriptKill(err error) bool { return strings.Contains(err.Error(), "killed by user") }

// isDial reports whether the server could not be reached in the first place.
func isDial(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// Reason names the cause of a store error in one word of a fixed set, for
// metrics: timeout, connection, late, loading, readonly, oom, auth, busy,
// cluster, wrong_type, shape, closed, breaker_open, panic or other.
func Reason(err error) string {
	var netErr net.Error
	switch {
	case errors.Is(err, errShape):
		return "shape"
	case errors.Is(err, errLate):
		return "late"
	case errors.Is(err, errBreakerOpen):
		return "breaker_open"
	case errors.Is(err, errPanic):
		return "panic"
	case errors.Is(err, redis.ErrClosed):
		return "closed"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, redis.ErrPoolTimeout):
		return "timeout"
	}
	if answer, ok := errors.AsType[redis.Error](err); ok {
		word, _, _ := strings.Cut(answer.Error(), " ")
		switch word {
		case "LOADING":
			return "loading"
		case "READONLY", "MASTERDOWN", "NOREPLICAS", "MISCONF":
			return "readonly"
		case "OOM":
			return "oom"
		case "NOAUTH", "WRONGPASS", "NOPERM":
			return "auth"
		case "BUSY":
			return "busy"
		case "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK", "CROSSSLOT":
			return "cluster"
		case "WRONGTYPE":
			return "wrong_type"
		}
		switch {
		case strings.Contains(answer.Error(), "The user executing the script"):
			return "auth" // how Redis 7 says NOPERM from within a script
		case strings.HasPrefix(answer.Error(), "ERR Protocol error: unauthenticated"):
			return "auth" // NOAUTH for a command of more than ten words
		case isScriptKill(err):
			return "busy"
		case strings.Contains(answer.Error(), "max number of clients"):
			return "connection"
		}
		return "other"
	}
	switch {
	case errors.As(err, &netErr) && netErr.Timeout():
		return "timeout"
	case netErr != nil, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed):
		return "connection"
	}
	return "other"
}

// quietClient silences go-redis's own log, which has a line for every failed
// dial: what fails is reported by Observe, and not on standard error.
var quietClient = sync.OnceFunc(logging.Disable)
