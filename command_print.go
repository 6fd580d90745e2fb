// SPDX-License-Identifier: Apache-2.0

package striperatelimit

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/control"
)

// table prints rows with aligned columns, below each other.
func (c *client) table(rows ...[]string) {
	w := tabwriter.NewWriter(c.cmd.OutOrStdout(), 0, 0, 3, ' ', 0)
	for _, row := range rows {
		_, _ = fmt.Fprintln(w, "  "+strings.Join(row, "\t"))
	}
	_ = w.Flush()
}

// clearScreen makes room for the next view, on a terminal.
func (c *client) clearScreen() {
	if out, ok := c.cmd.OutOrStdout().(*os.File); ok {
		if info, err := out.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			c.printf("\x1b[H\x1b[2J")
			return
		}
	}
	c.printf("\n")
}

// printStatus prints a status, with rates since another one unless that is nil.
func (c *client) printStatus(s, before *status, only string) {
	if s.Store == nil {
		c.printf("No running config has limits; add stripe_ratelimit to a site and reload.\n")
		return
	}
	c.printf("Store      %s\n", s.Store.words())
	c.printSwitches(s.Switches)
	if s.Overrides > 0 {
		c.printf("Overrides  %d in force\n", s.Overrides)
	}
	shown := 0
	for i := range s.Pools {
		if p := &s.Pools[i]; only == "" || p.Pool == only {
			shown++
			c.printPool(p, before.pool(p.Pool), before.until(s))
		}
	}
	if shown == 0 {
		c.printf("\nThere is no pool %q here.\n", only)
	}
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
		words += ", FAILING: " + strings.Join(s.Failing, ", ") + "; on_store_error says what becomes of requests"
	} else if s.Error != "" {
		words += ", failed just now: " + s.Error
	}
	if s.Waiting > 0 {
		words += fmt.Sprintf(", %d changes wait for it", s.Waiting)
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

func (c *client) printPool(p, before *poolStatus, elapsed float64) {
	c.printf("\nPool %s: %d critical and %d other requests in progress\n", p.Pool, p.InFlight.Critical, p.InFlight.NonCritical)
	per := ""
	if before != nil && elapsed > 0 {
		per = "/S"
	}
	rows := make([][]string, 0, 1+len(p.Limits))
	rows = append(rows, []string{"LIMIT", "IN FORCE", "MODE", "ALLOWED" + per, "REJECTED" + per, "WOULD REJECT" + per, "ERRORS" + per})
	for i := range p.Limits {
		l := &p.Limits[i]
		mode := l.Mode
		if l.Source != "config" {
			mode += " (" + l.Source + ")"
		}
		now, then := l.triggers(), triggers{}
		if per != "" {
			then = before.limit(l.Kind, l.Limit).triggers()
		}
		row := []string{l.name(), l.Numbers, mode}
		for j := range now {
			if per == "" {
				row = append(row, fmt.Sprint(now[j]))
			} else {
				row = append(row, fmt.Sprintf("%.1f", float64(now[j]-then[j])/elapsed))
			}
		}
		rows = append(rows, row)
	}
	c.table(rows...)
	if w := p.Workers; w != nil {
		c.printf("  workers: %s\n", w.words())
	}
	if f := p.Fleet; f != nil {
		c.printf("  fleet: %s\n", f.words())
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
	rejected := func(m map[string]uint64) uint64 { return m["denied"] + m["shed"] }
	enforced, dark := l.Decisions["enforce"], l.Decisions["dark"]
	return triggers{
		enforced["allowed"] + dark["allowed"],
		rejected(enforced), rejected(dark),
		enforced["store_error"] + dark["store_error"],
	}
}

func (w *workersReport) words() string {
	words := "utilization not known"
	if w.Utilization != nil {
		words = fmt.Sprintf("utilization %.0f%%", *w.Utilization*100)
	}
	words += fmt.Sprintf(", level %.2f, ", w.Level)
	var sheds []string
	for _, class := range []string{"test_mode", "get", "post"} {
		if chance := w.Probability[class]; chance > 0 {
			sheds = append(sheds, fmt.Sprintf("%.0f%% of %s", chance*100, class))
		}
	}
	if len(sheds) == 0 {
		return words + "sheds nothing"
	}
	return words + "sheds " + strings.Join(sheds, ", ")
}

func (f *fleetReport) words() string {
	words := fmt.Sprintf("%s; %d of %d slots for non-critical requests in use, instances own %d, this one %d; %d critical requests",
		count(f.Instances, "instance"), f.InFlight, f.Allocation, f.Claims, f.Claim, f.Critical)
	if f.Error != "" {
		words += "; the last sync failed: " + f.Error
	}
	return words
}

func (c *client) printSwitches(switches []control.Switch) {
	if len(switches) == 0 {
		c.printf("Switches   none; all is as the config has it\n")
		return
	}
	c.printf("Switches\n")
	rows := [][]string{{"TARGET", "MODE", "SCOPE", "ENDS", "ACTOR", "REASON"}}
	for _, s := range switches {
		rows = append(rows, []string{s.Target.String(), s.Mode.String(), string(s.Scope), ends(s.Until), s.Actor, s.Reason})
	}
	c.table(rows...)
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
	c.table(rows...)
}

func overriddenTo(o *control.Override) string {
	if o.Capacity > 0 {
		return fmt.Sprintf("%d in progress", o.Capacity)
	}
	return fmt.Sprintf("%d requests a period, burst %d", o.Requests, o.Burst)
}

// ends is a time in this machine's zone, and how far away it is.
func ends(t time.Time) string {
	return fmt.Sprintf("%s (in %s)", t.Local().Format("2006-01-02 15:04:05"), max(0, time.Until(t)).Round(time.Second))
}

func (c *client) printInspection(found inspection) {
	c.printf("Identity %s\n", found.Identity)
	rows := make([][]string, 0, 1+len(found.Limits))
	rows = append(rows, []string{"LIMIT", "IN FORCE", "LEFT", "NEXT ALLOWED", "NOTE"})
	for i := range found.Limits {
		l := &found.Limits[i]
		rows = append(rows, []string{control.Target{Pool: l.Pool, Kind: l.Kind, Limit: l.Limit}.String(), l.Numbers, l.left(), next(l.NextAllowed), l.note()})
	}
	c.table(rows...)
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
		c.table(rows...)
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
