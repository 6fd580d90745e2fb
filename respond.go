// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"errors"
	"math/big"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// outcome is what became of a request.
type outcome uint8

const (
	outcomeAllowed    outcome = iota
	outcomeDenied             // 429: the user's own share is used up
	outcomeShed               // 503: our health
	outcomeExempt             // not looked at
	outcomeStoreError         // the store failed: passed, by local numbers or any; or 503 with on_store_error closed
	outcomePanic              // a bug of ours: passed
)

var outcomes = [...]string{"allowed", "denied", "shed", "exempt", "store_error", "panic"}

// String implements fmt.Stringer.
func (o outcome) String() string { return outcomes[o] }

// verdict is all that was decided about a request. It alone feeds the
// response, metrics, logs and placeholders, so they cannot disagree. Once
// annotate has seen it, it must not be reused for another request.
type verdict struct {
	outcome     outcome
	criticality shedding.Criticality // zero if the request was not classified
	shedBy      shedder              // that gave the request up
	wouldShed   shedder              // the dark one that would have
	closed      bool                 // on_store_error closed turned the store error into a 503
	begun       bool                 // the answer has begun to be written
	retryAfter  int                  // seconds, on rejections: what Retry-After says; reject sets it
	pool        string
	identity    limiters.Identity // of the handler's key; zero if there is none

	// The enforced limit that denied: the one with the longest wait; rate
	// before concurrency.
	denied *limitVerdict

	// The dark limit that would have denied, if any.
	wouldReject *limitVerdict

	// Every limit that applied, grouped by identity.
	limits []limitVerdict

	level shedding.Level // of the workers, when a shedder gave the request up

	next *verdict // of the next pool on the request's way; see annotate

	// Room for what most requests need, in one piece.
	few       [2]limitVerdict
	fewChecks [2]limiters.Check
	fewAsks   [1]limiters.Ask
	fields    [2]string // values of RateLimit and RateLimit-Policy
}

// shedder tells the two apart.
type shedder uint8

const (
	noShedder shedder = iota
	fleetShedder
	workersShedder
)

var shedderWords = [...]string{"", "fleet", "workers"}

// String implements fmt.Stringer: the word of config, metrics and placeholders.
func (s shedder) String() string { return shedderWords[s] }

// limitVerdict is what one limit said.
type limitVerdict struct {
	*limitNumbers
	identity limiters.Identity
	index    int32            // in Handler.limits
	sender   senderKind       // what messages call the identity
	endpoint bool             // the limit has matchers
	dark     bool             // it only counts
	local    bool             // the store failed, and this instance decided alone
	result   *limiters.Result // within those of the Admission; unanswered before there are any
}

var unanswered limiters.Result

// shown reports whether the RateLimit fields tell of the limit.
func (l *limitVerdict) shown() bool { return !l.dark && l.result.Outcome != limiters.Unknown }

// rejects reports whether the request ends here.
func (v *verdict) rejects() bool {
	return v.outcome == outcomeDenied || v.outcome == outcomeShed || v.closed
}

// reason is Stripe's word for a denial, or ours for another rejection.
func (v *verdict) reason() string {
	if v.closed {
		return codeUnavailable
	}
	if v.denied == nil {
		return ""
	}
	switch concurrency := v.denied.limit.Kind == limiters.Concurrency; {
	case concurrency && v.denied.endpoint:
		return "endpoint-concurrency"
	case concurrency:
		return "global-concurrency"
	case v.denied.endpoint:
		return "endpoint-rate"
	}
	return "global-rate"
}

// What rejections give as `code`.
const (
	codeRateLimit   = "rate_limit"
	codeUnavailable = "limiter_unavailable"
	codeOverloaded  = "overloaded"
)

// apiError is a rejection in the form of Stripe's API, which every client
// library of Stripe's understands.
type apiError struct {
	status  int
	kind    string // `type`
	code    string
	message [6]string // in pieces: most are written without having been joined
}

// fields sets header fields of one value each, which share their memory.
type fields struct {
	http.Header
	values []string
}

// set sets a field by its canonical name.
func (f *fields) set(name, value string) {
	f.values = append(f.values, value)
	n := len(f.values)
	f.Header[name] = f.values[n-1 : n : n]
}

// reject answers a request that ends here, or returns the error that makes
// handle_errors do it, which must stay unwrapped. u, in [0, 1), spreads the
// clients' return: they obey Retry-After to the millisecond.
func (h *Handler) reject(w http.ResponseWriter, r *http.Request, v *verdict, u float64) error {
	header := fields{w.Header(), make([]string, 0, 7)}
	v.settleFields(header.Header)
	var e apiError
	switch {
	case v.closed:
		e = closed(v, u)
	case v.outcome == outcomeShed:
		e = h.overloaded(&header, v, u)
	default:
		e = h.deny(&header, v, u)
	}
	// A 503 of ours is a decision, and counted: not an ERROR line a request,
	// just when there is too much to do.
	if e.status >= 500 && caddyhttp.GetVar(r.Context(), caddyhttp.LogLevelVar) == nil {
		caddyhttp.SetVar(r.Context(), caddyhttp.LogLevelVar, "INFO")
	}
	header.set("Cache-Control", "no-store")
	if v.retryAfter > 0 {
		seconds := strconv.Itoa(v.retryAfter)
		header.set("Retry-After", seconds)
		words := e.message[3:]
		words[0], words[1], words[2] = " Retry after ", seconds, " seconds."
		if v.retryAfter == 1 {
			words[2] = " second."
		}
	}
	if header.Get("Request-Id") == "" {
		if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
			id, _ := repl.GetString("http.request.uuid")
			header.set("Request-Id", id)
		}
	}
	if h.Reject == "error" {
		return caddyhttp.Error(e.status, errors.New(strings.Join(e.message[:], "")))
	}
	body := e.body(h.DocURL)
	header.set("Content-Type", "application/json")
	if r.Method == http.MethodHead {
		// With a body net/http knows the length. A ninth field would make a
		// larger map of the header.
		header.set("Content-Length", strconv.Itoa(len(body)))
	}
	v.begun = true
	w.WriteHeader(e.status)
	if r.Method != http.MethodHead {
		// It fails only if the client has gone.
		_, _ = w.Write(body)
	}
	return nil
}

// settleFields takes back what pools that the request has passed promised: a 503
// has no RateLimit fields, and a 429 no time before Retry-After or after it that
// a client could take for the one to wait.
func (v *verdict) settleFields(header http.Header) {
	if v.denied == nil {
		header.Del("Ratelimit")
		header.Del("Ratelimit-Policy")
		return
	}
	for i, field := range header["Ratelimit"] {
		header["Ratelimit"][i] = resetRE.ReplaceAllString(field, "")
	}
}

var resetRE = regexp.MustCompile(`;t=\d+`)

// closed returns the 503 of a request that nobody can judge.
func closed(v *verdict, u float64) apiError {
	v.retryAfter = retryAfter(0, u)
	return apiError{
		status: http.StatusServiceUnavailable, kind: "api_error", code: codeUnavailable,
		message: [6]string{"The request cannot be checked against its limits at the moment."},
	}
}

// overloaded returns the 503 of a request that was shed. The more is shed, the
// longer and the wider clients are spread; test traffic is told not to return
// by itself at all, because a library's retries are load, too. Nothing tells how
// much the fleet can serve.
func (h *Handler) overloaded(header *fields, v *verdict, u float64) apiError {
	if h.ShouldRetry == "auto" && v.criticality == shedding.TestMode {
		header.set("Stripe-Should-Retry", "false")
	} else {
		most := 2 + 8*max(0, min(1, float64(v.level)))
		v.retryAfter = 1 + int(most*u)
	}
	return apiError{
		status: http.StatusServiceUnavailable, kind: "api_error", code: codeOverloaded,
		message: [6]string{"The API has too much to do at the moment and serves more important requests first."},
	}
}

// deny sets the fields of a 429 and returns the rest of it.
func (h *Handler) deny(header *fields, v *verdict, u float64) apiError {
	denied := v.denied
	v.retryAfter = retryAfter(denied.result.RetryAfter, u)
	if h.RateLimitHeaders == nil || *h.RateLimitHeaders {
		v.setRateLimitFields(header.Header)
	}
	header.set("Stripe-Rate-Limited-Reason", v.reason())
	// No clock frees a concurrency slot, so nobody can promise one in a second.
	if h.ShouldRetry == "auto" && denied.limit.Kind == limiters.Rate && denied.result.RetryAfter <= time.Second {
		header.set("Stripe-Should-Retry", "true")
	}
	return apiError{
		status: http.StatusTooManyRequests, kind: "invalid_request_error", code: codeRateLimit,
		message: [6]string{denied.words.exceeded, denied.sender.String(), denied.words.named},
	}
}

// retryAfter returns after how many seconds a client shall come back: never
// before wait has passed, and up to a fifth later, at least 0 or 1; 1 to 3 where
// nobody knows the wait.
func retryAfter(wait time.Duration, u float64) int {
	if wait <= 0 {
		return 1 + int(3*u)
	}
	least := int(seconds(wait))
	return least + int(float64(max(1, least/5)+1)*u)
}

// seconds rounds up.
func seconds(d time.Duration) int64 {
	whole := int64(d / time.Second)
	if d%time.Second > 0 {
		whole++
	}
	return whole
}

// body renders the error as Stripe's API would.
func (e *apiError) body(docURL string) []byte {
	b := make([]byte, 0, 320) // most fit in
	b = append(b, `{"error":{"type":"`...)
	b = append(b, e.kind...)
	b = append(b, `","code":"`...)
	b = append(b, e.code...)
	b = append(b, `","message":"`...)
	for _, piece := range e.message {
		b = appendJSON(b, piece)
	}
	if docURL != "" {
		b = append(b, `","doc_url":"`...)
		b = appendJSON(b, docURL)
	}
	return append(b, `"}}`...)
}

// appendJSON appends text as it stands in a JSON string: as it is, where
// encoding/json would turn `&` into `\u0026`.
func appendJSON(b []byte, text string) []byte {
	asItIs := 0 // of the text, up to where it has been appended
	for i, c := range text {
		switch {
		case c == '"' || c == '\\':
			b = append(append(b, text[asItIs:i]...), '\\', byte(c))
		case c < ' ':
			b = append(append(b, text[asItIs:i]...), `\u00`...)
			b = append(b, "0123456789abcdef"[c>>4], "0123456789abcdef"[c&15])
		case c == utf8.RuneError: // or a byte that is no UTF-8
			b = append(append(b, text[asItIs:i]...), "\uFFFD"...)
		default:
			continue
		}
		_, size := utf8.DecodeRuneInString(text[i:])
		asItIs = i + size
	}
	return append(b, text[asItIs:]...)
}

// limitWords is what responses say of one limit, rendered once.
type limitWords struct {
	policy    string // its item of RateLimit-Policy
	remaining string // its item of RateLimit, up to the number that remains
	exceeded  string // the message up to the source of the key
	named     string // the message from there to the end of its first sentence
}

// maxFieldInteger is the largest integer of a structured field (RFC 9651).
const maxFieldInteger = 999_999_999_999_999

func newLimitWords(l *limiters.Limit) *limitWords {
	quoted := `"` + l.Name + `"`
	words := &limitWords{
		policy:    quoted + ";q=" + strconv.FormatInt(min(l.Capacity, maxFieldInteger), 10),
		remaining: quoted + ";r=",
		exceeded:  "Request " + l.Kind.String() + " limit exceeded: ",
	}
	weight := ""
	if l.Kind == limiters.Concurrency {
		words.policy += `;qu="concurrent-requests"`
		words.exceeded += count(l.Capacity, "request") + " in progress"
	} else {
		words.policy += ";w=" + window(l).String()
		words.exceeded += count(l.Requests, "request") + " per " + period(l.Period)
		if l.Cost > 1 {
			weight = ", where this request counts as " + strconv.FormatInt(l.Cost, 10)
		}
	}
	words.exceeded += " for this "
	words.named = " (limit " + quoted + weight + ")."
	return words
}

// window is the time in which an empty bucket fills, in whole seconds, rounded
// up; in big integers, because its product leaves 64 bits.
func window(l *limiters.Limit) *big.Int {
	fill := new(big.Int).Mul(big.NewInt(l.Capacity), big.NewInt(int64(l.Period)))
	perSecond := new(big.Int).Mul(big.NewInt(l.Requests), big.NewInt(int64(time.Second)))
	fill.Add(fill, perSecond).Sub(fill, big.NewInt(1))
	return fill.Div(fill, perSecond)
}

// period names a time in its largest whole unit: `second`, `10 seconds`.
func period(d time.Duration) string {
	unit, word := time.Microsecond, "microsecond"
	for _, larger := range []struct {
		unit time.Duration
		word string
	}{
		{time.Millisecond, "millisecond"},
		{time.Second, "second"},
		{time.Minute, "minute"},
		{time.Hour, "hour"},
		{24 * time.Hour, "day"},
	} {
		if d%larger.unit == 0 {
			unit, word = larger.unit, larger.word
		}
	}
	if d == unit {
		return word
	}
	return count(int64(d/unit), word)
}

// count says how many: `1 second`, `2 seconds`.
func count(n int64, word string) string {
	if n != 1 {
		word += "s"
	}
	return strconv.FormatInt(n, 10) + " " + word
}

// setRateLimitFields adds the limits that applied to RateLimit and RateLimit-Policy
// (draft-ietf-httpapi-ratelimit-headers-11). A limit whose store did not answer
// is left out.
//
// On a rejection only the limits that denied say when there is more: clients
// may take any such time for the one to wait, and Retry-After must not be
// earlier.
//
// On allowed responses it comes before the next handler, so that streams have
// the fields too. An API behind a proxy that sends some itself adds them to
// ours: both are lists, and two fields of one name are one list (RFC 9651,
// section 4.2). Where its fields are of another draft, `header_down
// -RateLimit*` in reverse_proxy keeps them out.
func (v *verdict) setRateLimitFields(header http.Header) {
	rejected := false
	for i := range v.limits {
		l := &v.limits[i]
		rejected = rejected || l.shown() && l.result.Outcome == limiters.Denied
	}
	var array [256]byte
	text := array[:0]
	for i := range v.limits {
		text = v.limits[i].appendRemaining(text, rejected)
	}
	if len(text) == 0 {
		return
	}
	policy := len(text)
	for i := range v.limits {
		if l := &v.limits[i]; l.shown() {
			if len(text) > policy {
				text = append(text, ", "...)
			}
			text = append(text, l.words.policy...)
		}
	}
	// One text for both fields: this is on the way of every request.
	both := string(text)
	v.fields = [...]string{both[:policy], both[policy:]}
	for i, name := range [...]string{"Ratelimit", "Ratelimit-Policy"} {
		if others := header[name]; len(others) > 0 { // of another pool
			header[name] = append(others, v.fields[i])
		} else {
			header[name] = v.fields[i : i+1 : i+1]
		}
	}
}

// appendRemaining appends the limit's item of RateLimit.
func (l *limitVerdict) appendRemaining(text []byte, rejected bool) []byte {
	denied := l.result.Outcome == limiters.Denied
	if !l.shown() {
		return text
	}
	if len(text) > 0 {
		text = append(text, ", "...)
	}
	text = append(text, l.words.remaining...)
	text = strconv.AppendInt(text, min(l.result.Remaining, maxFieldInteger), 10)
	wait := l.result.NextToken
	if denied && wait == 0 { // as the denial cache answers
		wait = l.result.RetryAfter
	}
	if wait > 0 && (denied || !rejected) {
		text = append(text, ";t="...)
		text = strconv.AppendInt(text, seconds(wait), 10)
	}
	return text
}
