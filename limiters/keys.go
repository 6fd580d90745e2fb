// SPDX-License-Identifier: Apache-2.0

package limiters

import "encoding/hex"

// stateKey names what a store keeps about one identity and one limit.
type stateKey struct {
	identity Identity
	pool     string
	suffix   string // Limit.suffix
}

func (l *Limit) stateKey(id Identity) stateKey { return stateKey{id, l.Pool, l.suffix} }

// redis returns the key in Redis. Every key of an identity has the identity as
// its hash tag, so that one script may use them all in a Cluster.
func (k stateKey) redis(prefix string) string {
	b := make([]byte, 0, len(prefix)+len(k.pool)+len(k.suffix)+2*len(k.identity)+3)
	b = append(b, prefix...)
	b = append(b, k.pool...)
	b = append(b, ':', '{')
	b = hex.AppendEncode(b, k.identity[:])
	b = append(b, '}')
	b = append(b, k.suffix...)
	return string(b)
}
