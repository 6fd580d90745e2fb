// SPDX-License-Identifier: Apache-2.0

package limiters

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"sync"
)

// stateKey names what a store keeps about one identity and one limit. It has no
// pointers, so that the garbage collector need not look at a million of them.
type stateKey struct {
	identity Identity
	state    stateID
}

// stateID stands for a stateName.
type stateID uint32

// stateName is what keys have around the identity. Limits of one name share
// their state, whatever their numbers.
type stateName struct{ pool, suffix string }

// stateNames are all that this process has seen: as many as its configs had.
var stateNames struct {
	sync.RWMutex
	ids   map[stateName]stateID
	names []stateName // by id
}

// id returns the same for the same name, and another for another one.
func (n stateName) id() stateID {
	stateNames.Lock()
	defer stateNames.Unlock()
	id, ok := stateNames.ids[n]
	if !ok {
		if stateNames.ids == nil {
			stateNames.ids = map[stateName]stateID{}
		}
		id = stateID(len(stateNames.names))
		stateNames.ids[n] = id
		stateNames.names = append(stateNames.names, n)
	}
	return id
}

func (id stateID) name() stateName {
	stateNames.RLock()
	defer stateNames.RUnlock()
	return stateNames.names[id]
}

func (l *Limit) stateKey(id Identity) stateKey { return stateKey{id, l.state} }

func (k stateKey) compare(o stateKey) int {
	return cmp.Or(bytes.Compare(k.identity[:], o.identity[:]), cmp.Compare(k.state, o.state))
}

// redis returns the key in Redis.
func (k stateKey) redis(prefix string) string {
	var room [128]byte // for what is usual
	var digits [2 * len(k.identity)]byte
	hex.Encode(digits[:], k.identity[:])
	return string(k.state.name().append(room[:0], prefix, digits[:]))
}

// append appends the key of an identity, which is given in hexadecimal digits. Every
// key of an identity has it as its hash tag, so that one script may use them all in
// a Cluster.
func (n stateName) append(b []byte, prefix string, identity []byte) []byte {
	b = append(append(b, prefix...), n.pool...)
	b = append(append(b, ":{"...), identity...)
	return append(append(b, '}'), n.suffix...)
}
