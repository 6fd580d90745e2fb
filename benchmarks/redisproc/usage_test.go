// SPDX-License-Identifier: Apache-2.0

package redisproc

import (
	"reflect"
	"testing"
)

func TestParseInfo(t *testing.T) {
	info := "# CPU\r\nused_cpu_sys:1.500000\r\nused_cpu_user:2.250001\r\nused_cpu_sys_children:9.0\r\n" +
		"# Commandstats\r\ncmdstat_evalsha:calls=12,usec=340,usec_per_call=28.33,rejected_calls=0,failed_calls=0\r\n" +
		"cmdstat_client|setinfo:calls=2,usec=1,usec_per_call=0.50,rejected_calls=0,failed_calls=0\r\ncmdstat_info:calls=3,usec=9,usec_per_call=3.00\r\n" +
		"# Stats\r\ntotal_net_input_bytes:1000\r\ntotal_net_output_bytes:200\r\n"
	got, err := parseInfo(info)
	want := map[string]float64{"evalsha": 12, "client|setinfo": 2}
	if err != nil || got.CPU != 3_750_001 || got.Script != 340 || got.In != 1000 || got.Out != 200 || !reflect.DeepEqual(got.Calls, want) {
		t.Errorf("got %+v, %v, want 3750001 us, of which 340 in scripts, 1000 bytes in, 200 out, and %v", got, err, want)
	}
	for _, bad := range []string{"used_cpu_sys:much", "cmdstat_get:calls=many,"} {
		if got, err := parseInfo(bad); err == nil {
			t.Errorf("%q: got %v, want an error", bad, got)
		}
	}
}
