// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"hash"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/limiters"
	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

// The sources that are not texts with placeholders.
const (
	sourceAPIKey   = "api_key"
	sourceClientIP = "client_ip"

	clientIPPlaceholder = "http.vars.client_ip"
)

// keySources is where an identity comes from: the first that is not empty.
type keySources []keySource

// keySource is one source. It is split at the start, so that a request looks
// placeholders up by name and builds no text.
type keySource struct {
	word         string   // as configured
	placeholders []string // the names in a text; none for the other sources
}

// senderKind is what messages call who sent a request.
type senderKind uint8

const (
	senderUnknown senderKind = iota
	senderAPIKey
	senderClientAddress
	senderIdentity
)

var senderKinds = [...]string{"", "API key", "client address", "identity"}

// String implements fmt.Stringer.
func (s senderKind) String() string { return senderKinds[s] }

// parseSources reads the arguments of `key`. It fails on a bare word other than
// api_key and client_ip, on a text whose braces do not pair, and on a source
// that is given twice.
func parseSources(words []string) (keySources, error) {
	sources := make(keySources, 0, len(words))
	for _, word := range words {
		source := keySource{word: word}
		switch word {
		case sourceAPIKey, sourceClientIP:
		case "{client_ip}", "{" + clientIPPlaceholder + "}":
			source.word = sourceClientIP
		default:
			if source.placeholders = placeholderNames(word); len(source.placeholders) == 0 {
				return nil, fmt.Errorf("key source '%s' is not api_key, client_ip or a text with placeholders such as {http.request.header.X-User}", word)
			}
		}
		if slices.ContainsFunc(sources, func(s keySource) bool { return s.word == source.word }) {
			return nil, fmt.Errorf("key source '%s' is given twice", word)
		}
		sources = append(sources, source)
	}
	return sources, nil
}

// placeholderNames returns the names of the placeholders in text, none if its
// braces do not pair or are escaped.
func placeholderNames(text string) []string {
	var names []string
	for rest := text; ; {
		literal, after, more := strings.Cut(rest, "{")
		if strings.ContainsAny(literal, `}\`) {
			return nil
		}
		if !more {
			return names
		}
		name, after, closed := strings.Cut(after, "}")
		if !closed || name == "" || strings.ContainsAny(name, "{\\ \t\n") {
			return nil
		}
		if name == "client_ip" { // the Caddyfile's shorthand, unknown to a replacer
			name = clientIPPlaceholder
		}
		names = append(names, name)
		rest = after
	}
}

// identify returns the identity that the first source which is not empty gives
// the request, and what messages call it; the zero Identity if all are empty.
// key is the request's apiKey. Client addresses count as one within ipv6Prefix
// bits.
func (s keySources) identify(r *http.Request, repl *caddy.Replacer, key string, h *hasher, ipv6Prefix int) (limiters.Identity, senderKind) {
	for _, source := range s {
		switch source.word {
		case sourceAPIKey:
			if key != "" {
				return h.identity(sourceAPIKey, key), senderAPIKey
			}
		case sourceClientIP:
			if addr := clientAddr(r, ipv6Prefix); addr.IsValid() {
				var text [48]byte
				return h.identity(sourceClientIP, string(addr.AppendTo(text[:0]))), senderClientAddress
			}
		default:
			var array [4]string
			values := source.values(array[:0], r, repl, ipv6Prefix)
			if len(values) > 0 {
				return h.identity(source.word, values...), senderIdentity
			}
		}
	}
	return limiters.Identity{}, senderUnknown
}

// values appends the values of the placeholders; none if one of them is empty.
func (s keySource) values(values []string, r *http.Request, repl *caddy.Replacer, ipv6Prefix int) []string {
	for _, name := range s.placeholders {
		value, _ := repl.Get(name)
		text := caddy.ToString(value)
		if text == "" {
			return nil
		}
		// Within a composite, too, a new address in the same network must not
		// be a new identity.
		if name == clientIPPlaceholder {
			if addr := clientAddr(r, ipv6Prefix); addr.IsValid() {
				text = addr.String()
			}
		}
		values = append(values, text)
	}
	return values
}

// apiKey returns the key that the request presents: the token of
// `Authorization: Bearer`, the user of `Basic`, or X-API-Key; empty if there is
// none. It is not verified and can be anything.
func apiKey(r *http.Request) string {
	authorization := strings.TrimSpace(firstValue(r, "Authorization"))
	if i := strings.IndexAny(authorization, " \t"); i > 0 {
		scheme, credentials := authorization[:i], strings.TrimSpace(authorization[i:])
		switch {
		case strings.EqualFold(scheme, "Bearer"):
			return credentials
		case strings.EqualFold(scheme, "Basic"):
			if user := basicUser(credentials); user != "" {
				return user
			}
		}
	}
	return strings.TrimSpace(firstValue(r, "X-Api-Key"))
}

// firstValue is Header.Get for a name that is canonical already.
func firstValue(r *http.Request, name string) string {
	if values := r.Header[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// basicUser returns the user in the credentials of Basic authentication. Like
// the most lenient APIs it skips what is not base64, with or without padding: a
// sloppier reading here than there would let one key pass as many.
func basicUser(credentials string) string {
	var encodedArray, decodedArray [256]byte
	encoded, decoded := encodedArray[:0], decodedArray[:]
	for i := range len(credentials) {
		switch c := credentials[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '+', c == '/':
			encoded = append(encoded, c)
		}
	}
	if need := base64.RawStdEncoding.DecodedLen(len(encoded)); need > len(decoded) {
		decoded = make([]byte, need)
	}
	// The only error left is a lone last character, which holds no whole byte.
	n, _ := base64.RawStdEncoding.Decode(decoded, encoded)
	user, _, _ := bytes.Cut(decoded[:n], []byte(":"))
	return string(bytes.TrimSpace(user))
}

// clientAddr returns the address of the client as the server's trusted_proxies
// have it, IPv6 cut to prefix bits; invalid if there is none, as on a Unix
// socket.
func clientAddr(r *http.Request, prefix int) netip.Addr {
	text, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return netip.Addr{}
	}
	addr = addr.Unmap()
	if addr.Is4() {
		return addr
	}
	network, err := addr.Prefix(prefix) // drops the zone, too
	if err != nil {
		return netip.Addr{}
	}
	return network.Addr()
}

// hasher turns what identifies a sender into an Identity. It is safe for
// concurrent use.
type hasher struct{ states sync.Pool }

type hashState struct {
	mac hash.Hash
	buf []byte
	sum [sha256.Size]byte
}

// newHasher returns a hasher whose identities nobody can compute, and so guess
// a sender from, without the secret.
func newHasher(secret []byte) *hasher {
	secret = bytes.Clone(secret)
	return &hasher{states: sync.Pool{New: func() any {
		return &hashState{mac: hmac.New(sha256.New, secret)}
	}}}
}

// identity returns the identity of the values that a source gave: their
// HMAC-SHA-256, cut to 128 bits. Each text goes in behind its length, so that
// neither another source nor another split of the same characters gives the
// same identity.
func (h *hasher) identity(source string, values ...string) limiters.Identity {
	s := h.states.Get().(*hashState)
	s.buf = appendField(s.buf[:0], source)
	for _, value := range values {
		s.buf = appendField(s.buf, value)
	}
	s.mac.Reset()
	s.mac.Write(s.buf)
	id := limiters.Identity(s.mac.Sum(s.sum[:0])[:len(limiters.Identity{})])
	clear(s.buf) // no key outlives its request here
	h.states.Put(s)
	return id
}

func appendField(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

// inShare reports whether the identity belongs to the stable percentage of
// identities for which a limit is enforced. Whoever is in a share is in every
// larger one; a request without identity is in none.
func inShare(id limiters.Identity, percent int) bool {
	return !id.IsZero() && binary.BigEndian.Uint64(id[8:])%100 < uint64(max(percent, 0))
}

// ranking is how a handler tells the criticality of requests.
type ranking struct {
	critical    caddyhttp.MatcherSets
	testMode    caddyhttp.MatcherSets // if empty, the API key tells
	testModeOff bool
}

// criticality ranks a request whose apiKey is key. Test mode wins over
// critical: no money moves in test mode, and what a client claims about itself
// can so only lower its rank. It fails if a matcher does.
func (k *ranking) criticality(r *http.Request, key string) (shedding.Criticality, error) {
	if !k.testModeOff {
		test, err := anyMatch(k.testMode, r)
		if err != nil {
			return 0, err
		}
		if test || len(k.testMode) == 0 && isTestKey(key) {
			return shedding.TestMode, nil
		}
	}
	critical, err := anyMatch(k.critical, r)
	if err != nil {
		return 0, err
	}
	if critical {
		return shedding.Critical, nil
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return shedding.Get, nil
	}
	return shedding.Post, nil
}

// anyMatch reports whether one of the matcher sets matches; no sets match
// nothing here, where for Caddy they match everything.
func anyMatch(sets caddyhttp.MatcherSets, r *http.Request) (bool, error) {
	if len(sets) == 0 {
		return false, nil
	}
	return sets.AnyMatchWithError(r)
}

// isTestKey reports whether the key is one of test mode:
// ^(sk|rk|pk|ek)_(org_)?test_
func isTestKey(key string) bool {
	if len(key) < 3 {
		return false
	}
	switch key[:3] {
	case "sk_", "rk_", "pk_", "ek_":
		return strings.HasPrefix(strings.TrimPrefix(key[3:], "org_"), "test_")
	}
	return false
}

// isPreflight reports whether the request is a browser's question whether it
// may send another one. It carries no key, and a browser cannot retry it.
func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions &&
		r.Header.Get("Origin") != "" && r.Header.Get("Access-Control-Request-Method") != ""
}
