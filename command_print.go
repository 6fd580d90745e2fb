// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
)

// table writes rows with aligned columns, below each other.
func table(out io.Writer, rows ...[]string) {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	for _, row := range rows {
		_, _ = fmt.Fprintln(w, "  "+strings.Join(row, "\t"))
	}
	_ = w.Flush()
}

// show puts a text in the place of the one before, on a terminal. Lines that are
// too long are cut off there.
func (c *client) show(text string) {
	if out, ok := c.cmd.OutOrStdout().(*os.File); ok {
		if info, err := out.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			c.printf("\x1b[?7l\x1b[H%s\x1b[J\x1b[?7h", strings.ReplaceAll(text, "\n", "\x1b[K\n"))
			return
		}
	}
	c.printf("%s\n", text)
}

// statusText is a status in words, with rates since another one unless that is
// nil.
func statusText(s *status, only string, before *status) (string, error) {
	if s.Store == nil {
		return "No running config has limits; add stripe_ratelimit to a site and reload.\n", nil
	}
	var pools []*poolStatus
	var names []string
	for i := range s.Pools {
		p := &s.Pools[i]
		if names = append(names, p.Pool); only == "" || p.Pool == only {
			pools = append(pools, p)
		}
	}
	if len(pools) == 0 {
		return "", unknown("pool", only, names)
	}
	out := new(strings.Builder)
	for _, line := range s.alarms() {
		fmt.Fprintf(out, "! %s\n", line)
	}
	fmt.Fprintf(out, "Store      %s\n", s.Store.words())
	printSwitches(out, s.Switches)
	if s.Overrides > 0 {
		fmt.Fprintf(out, "Overrides  %d in force\n", s.Overrides)
	}
	for _, p := range pools {
		printPool(out, p, before, before.until(s))
	}
	return out.String(), nil
}

// alarms is what somebody must see who looks at a status in an incident.
func (s *status) alarms() (lines []string) {
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	switch failing := strings.Join(s.Store.Failing, ", "); {
	case failing != "":
		say("REDIS FAILS (%s): on_store_error says what becomes of requests; switches stay in force", failing)
	case s.Store.Error != "":
		say("Redis failed just now: %s", s.Store.Error)
	}
	if s.Store.Waiting > 0 {
		say("%s for Redis: so far in force on this instance alone", wait(s.Store.Waiting))
	}
	limits, off, dark := 0, 0, 0
	for i := range s.Pools {
		for _, l := range s.Pools[i].Limits {
			limits++
			if l.Source != "switch" {
				continue
			}
			if dark++; l.Mode == control.Off.String() {
				off++
			}
		}
	}
	switch {
	case off == limits && off > 0:
		say("EVERY LIMIT IS OFF by a switch")
	case dark > 0:
		say("SWITCHES weaken %d of %s, %d of them to off", dark, count(int64(limits), "limit"), off)
	}
	for i := range s.Pools {
		lines = append(lines, s.Pools[i].alarms()...)
	}
	return lines
}

func wait(n int) string {
	if n == 1 {
		return "1 change waits"
	}
	return fmt.Sprintf("%d changes wait", n)
}

// unknownAlarm is for how many seconds a utilization must not be known for it to be
// an alarm: nobody has measured it in the first, and a probe's first answer takes one
// more.
const unknownAlarm = 3

func (p *poolStatus) alarms() (lines []string) {
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	sheds := func(kind, what string) {
		switch p.limit(kind, kind).mode() {
		case control.Off:
		case control.Dark:
			say("pool %s would shed, if %s were not dark: %s", p.Pool, kind, what)
		default:
			say("pool %s SHEDS by %s: %s", p.Pool, kind, what)
		}
	}
	if w := p.Workers; w != nil {
		if w.Unknown >= unknownAlarm {
			say("pool %s: the utilization of the workers is not known, so their level stays", p.Pool)
		}
		if w.Level > 0 {
			sheds("workers", w.sheds())
		}
	}
	// Without the store, and before its first answer, nothing is shed.
	if f := p.Fleet; f != nil && f.Error == "" && f.Capacity > 0 && f.InFlight >= f.Allocation {
		sheds("fleet", fmt.Sprintf("all %d slots of the fleet are in use", f.Allocation))
	}
	return lines
}

// mode is that in force; off for a limit that there is not.
func (l *limitStatus) mode() control.Mode {
	if l == nil {
		return control.Off
	}
	mode, err := control.ParseMode(l.Mode)
	if err != nil {
		return control.Enforce // which is none of a switch
	}
	return mode
}

func (s *storeStatus) words() string {
	words := s.Store
	switch {
	case s.Store == "memory":
		return words + ", of this process alone"
	case s.Instances == 0:
		words += ", not reached yet"
	default:
		words += ", " + count(s.Instances, "instance")
	}
	if len(s.Failing) > 0 {
		words += ", FAILS"
	}
	return words
}

// pool returns what a status said of a pool, nil if nothing.
func (s *status) pool(name string) *poolStatus {
	if s == nil {
		return nil
	}
	for i := range s.Pools {
		if s.Pools[i].Pool == name {
			return &s.Pools[i]
		}
	}
	return nil
}

// until returns the seconds from one status to the next; 0 if there is none.
func (s *status) until(next *status) float64 {
	if s == nil {
		return 0
	}
	return next.Time.Sub(s.Time).Seconds()
}

func printPool(out io.Writer, p *poolStatus, earlier *status, elapsed float64) {
	fmt.Fprintf(out, "\nPool %s: %d critical and %d other requests in progress\n", p.Pool, p.InFlight.Critical, p.InFlight.NonCritical)
	per := ""
	if earlier != nil {
		per = "/S"
	}
	before := earlier.pool(p.Pool)
	rows := make([][]string, 0, 1+len(p.Limits))
	rows = append(rows, []string{"LIMIT", "NUMBERS", "MODE", "ALLOWED" + per, "REJECTED" + per, "WOULD REJECT" + per, "ERRORS" + per})
	for i := range p.Limits {
		l := &p.Limits[i]
		mode := l.Mode
		if l.Source == "switch" {
			mode = strings.ToUpper(mode) + " (switch)"
		}
		row := []string{l.name(), l.Numbers, mode}
		then := before.limit(l.Kind, l.Limit).triggers()
		for j, n := range l.triggers() {
			switch {
			case per == "":
				row = append(row, fmt.Sprint(n))
			case before == nil || n < then[j]: // of the process before
				row = append(row, "-")
			default:
				row = append(row, fmt.Sprintf("%.1f", float64(n-then[j])/elapsed))
			}
		}
		rows = append(rows, row)
	}
	table(out, rows...)
	if w := p.Workers; w != nil {
		fmt.Fprintf(out, "  workers: %s\n", w.words())
	}
	if f := p.Fleet; f != nil {
		fmt.Fprintf(out, "  fleet: %s\n", f.words())
	}
}

// name is the limit as switches name it, without its pool.
func (l *limitStatus) name() string {
	if l.Kind == l.Limit {
		return l.Kind
	}
	return l.Kind + "/" + l.Limit
}

// limit returns what was said of a limit, nil if nothing.
func (p *poolStatus) limit(kind, name string) *limitStatus {
	if p == nil {
		return nil
	}
	for i := range p.Limits {
		if l := &p.Limits[i]; l.Kind == kind && l.Limit == name {
			return l
		}
	}
	return nil
}

// triggers are how often a limit allowed, rejected, would have rejected, and did
// not know.
type triggers [4]uint64

func (l *limitStatus) triggers() (t triggers) {
	if l == nil {
		return t
	}
	allowed := func(m map[string]uint64) uint64 { return m["allowed"] + m["local_allowed"] }
	rejected := func(m map[string]uint64) uint64 { return m["denied"] + m["local_denied"] + m["shed"] }
	enforced, dark := l.Decisions["enforce"], l.Decisions["dark"]
	return triggers{
		allowed(enforced) + allowed(dark),
		rejected(enforced), rejected(dark),
		enforced["store_error"] + dark["store_error"],
	}
}

func (w *workersReport) words() string {
	words := "utilization not known"
	if w.Utilization != nil {
		words = fmt.Sprintf("utilization %.0f%%", *w.Utilization*100)
	}
	return words + fmt.Sprintf(", level %.2f, sheds ", w.Level) + w.sheds()
}

// sheds is what is shed at the level.
func (w *workersReport) sheds() string {
	var sheds []string
	for _, class := range []string{"test_mode", "get", "post"} {
		if chance := w.Probability[class]; chance > 0 {
			sheds = append(sheds, fmt.Sprintf("%.0f%% of %s", chance*100, class))
		}
	}
	if len(sheds) == 0 {
		return "nothing"
	}
	return strings.Join(sheds, ", ")
}

func (f *fleetReport) words() string {
	words := fmt.Sprintf("%s; %d of %d slots for non-critical requests in use, instances own %d, this one %d; %d critical requests",
		count(f.Instances, "instance"), f.InFlight, f.Allocation, f.Claims, f.Claim, f.Critical)
	if f.Error != "" {
		words += "; the last sync failed: " + f.Error
	}
	return words
}

func printSwitches(out io.Writer, switches []control.Switch) {
	if len(switches) == 0 {
		fmt.Fprintf(out, "Switches   none; all is as the config has it\n")
		return
	}
	fmt.Fprintf(out, "Switches\n")
	rows := [][]string{{"TARGET", "MODE", "SCOPE", "ENDS", "ACTOR", "REASON"}}
	for _, s := range switches {
		rows = append(rows, []string{words(s.Target), s.Mode.String(), string(s.Scope), ends(s.Until), s.Actor, s.Reason})
	}
	table(out, rows...)
}

func (c *client) printOverrides(overrides []control.Override) {
	if len(overrides) == 0 {
		c.printf("Overrides  none\n")
		return
	}
	c.printf("Overrides\n")
	rows := [][]string{{"TARGET", "IDENTITY", "NUMBERS", "ENDS", "ACTOR", "REASON"}}
	for _, o := range overrides {
		rows = append(rows, []string{o.Target.String(), o.Identity, overriddenTo(&o), ends(o.Until), o.Actor, o.Reason})
	}
	table(c.cmd.OutOrStdout(), rows...)
}

func overriddenTo(o *control.Override) string {
	if o.Capacity > 0 {
		return fmt.Sprintf("%d in progress", o.Capacity)
	}
	return fmt.Sprintf("%d requests a period, burst %d", o.Requests, o.Burst)
}

// ends is a time in this machine's zone, and how far away it is.
func ends(t time.Time) string {
	return fmt.Sprintf("%s (in %s)", t.Local().Format("2006-01-02 15:04:05"), tidy(max(0, time.Until(t)).Round(time.Second)))
}

// tidy is a duration without units of which there are none.
func tidy(d time.Duration) string {
	text := d.String()
	if short, ok := strings.CutSuffix(text, "m0s"); ok {
		text = short + "m"
	}
	if short, ok := strings.CutSuffix(text, "h0m"); ok {
		text = short + "h"
	}
	return text
}

func (c *client) printInspection(found inspection) {
	if found.From == fromLocal {
		c.printf("! The store fails (%s): this is what this instance decides by ALONE meanwhile\n", found.StoreError)
	}
	c.printf("Identity %s\n", found.Identity)
	rows := make([][]string, 0, 1+len(found.Limits))
	rows = append(rows, []string{"LIMIT", "IN FORCE", "LEFT", "NEXT ALLOWED", "NOTE"})
	for i := range found.Limits {
		l := &found.Limits[i]
		rows = append(rows, []string{control.Target{Pool: l.Pool, Kind: l.Kind, Limit: l.Limit}.String(), l.Numbers, l.left(), next(l.NextAllowed), l.note()})
	}
	table(c.cmd.OutOrStdout(), rows...)
	for i := range found.Limits {
		l := &found.Limits[i]
		if len(l.Leases) == 0 {
			continue
		}
		c.printf("Leases of %s/%s/%s, the first to end first\n", l.Pool, l.Kind, l.Limit)
		rows := [][]string{{"INSTANCE", "AGE", "ENDS UNLESS RENEWED"}}
		for _, lease := range l.Leases {
			rows = append(rows, []string{cmp.Or(lease.Instance, "this one"), age(lease.Age), next(lease.Ends)})
		}
		table(c.cmd.OutOrStdout(), rows...)
	}
}

func (l *inspectedLimit) left() string {
	if l.Tokens != nil {
		return fmt.Sprintf("%d of %d tokens", *l.Tokens, l.Burst)
	}
	if l.InProgress == nil {
		return ""
	}
	return fmt.Sprintf("%d of %d slots", max(0, l.Capacity-*l.InProgress), l.Capacity)
}

func (l *inspectedLimit) note() string {
	switch {
	case l.Mode != control.Enforce.String():
		return "switched to " + l.Mode
	case l.Override != nil:
		return "overridden until " + ends(l.Override.Until)
	}
	return ""
}

// next is a number of seconds that are to pass.
func next(seconds float64) string {
	if seconds == 0 {
		return "now"
	}
	return time.Duration(seconds * float64(time.Second)).Round(time.Millisecond).String()
}

// age is a number of seconds that have passed.
func age(seconds float64) string {
	if seconds == 0 {
		return "not known"
	}
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}
