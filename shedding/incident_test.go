// SPDX-License-Identifier: Apache-2.0

package shedding_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

var update = flag.Bool("update", false, "write docs/workers.svg anew")

// incident is what happens to an instance in ten minutes.
var incident = []struct {
	seconds     int
	utilization float64
	what        string
}{
	{60, 0.60, "calm"},
	{90, 1.00, "overload"},
	{90, 0.87, "less of it"},
	{90, 0.75, "dead zone"},
	{270, 0.20, "over"},
}

// The plot in the documentation is what the code does. To draw it:
//
//	go test ./shedding -run TestIncident -update
func TestIncident(t *testing.T) {
	const file = "../docs/workers.svg"
	got := drawIncident()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s is not what the code does; go test ./shedding -run TestIncident -update (-file +code):\n%s", file, diff)
	}
}

// Sizes in pixels; a second is one wide.
const (
	left, top     = 130, 30
	panel, gap    = 110, 50
	width, height = left + 600 + 30, top + 3*(panel+gap)
)

// A line of a panel is a value for each second.
type line struct {
	name, color string
	values      []float64
}

func drawIncident() string {
	utilization := line{name: "utilization", color: "#333333"}
	level := line{name: "level", color: "#333333"}
	shares := []line{
		{name: "test_mode", color: "#0072b2"},
		{name: "get", color: "#009e73"},
		{name: "post", color: "#d55e00"},
		{name: "critical", color: "#333333"},
	}
	classes := []shedding.Criticality{shedding.TestMode, shedding.Get, shedding.Post, shedding.Critical}

	ramp, state := shedding.DefaultRamp(), shedding.RampState{}
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, part := range incident {
		for range part.seconds {
			state = ramp.Step(state, now, part.utilization)
			now = now.Add(time.Second)
			utilization.values = append(utilization.values, part.utilization)
			level.values = append(level.values, float64(state.Level))
			for i, c := range classes {
				shares[i].values = append(shares[i].values, state.Level.Probability(c))
			}
		}
	}

	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", width, height)
	y := top
	drawPanel(&b, y, "utilization", 0, 1, []float64{0, ramp.Good, ramp.Bad, 1}, utilization)
	x := left
	for _, part := range incident {
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="#555555">%s</text>`+"\n", x+2, y-8, part.what)
		x += part.seconds
	}
	y += panel + gap
	drawPanel(&b, y, "level", -0.25, 1, []float64{0, 1. / 3, 2. / 3, 1}, level)
	y += panel + gap
	drawPanel(&b, y, "share shed", 0, 1, []float64{0, 0.5, 1}, shares...)
	for i, share := range shares {
		fmt.Fprintf(&b, `<text x="8" y="%d" fill="%s">%s</text>`+"\n", y+38+16*i, share.color, share.name)
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// drawPanel draws lines over ten minutes, for values from low to high.
func drawPanel(b *strings.Builder, y int, name string, low, high float64, grid []float64, lines ...line) {
	at := func(value float64) int { return y + int(float64(panel)*(high-value)/(high-low)+0.5) }
	fmt.Fprintf(b, `<text x="8" y="%d" fill="#000000">%s</text>`+"\n", y+18, name)
	for _, value := range grid {
		fmt.Fprintf(b, `<path d="M%d %dh600" stroke="#cccccc"/><text x="%d" y="%d" text-anchor="end" fill="#555555">%.0f %%</text>`+"\n",
			left, at(value), left-6, at(value)+4, 100*value)
	}
	for minute := 0; minute <= 10; minute++ {
		fmt.Fprintf(b, `<path d="M%d %dv%d" stroke="#eeeeee"/><text x="%d" y="%d" text-anchor="middle" fill="#555555">%d min</text>`+"\n",
			left+60*minute, y, panel, left+60*minute, y+panel+16, minute)
	}
	for _, l := range lines {
		fmt.Fprintf(b, `<path fill="none" stroke="%s" stroke-width="2" d="M`, l.color)
		for second, value := range l.values {
			// A point where the line bends is enough.
			if second > 0 && second < len(l.values)-1 && at(value) == at(l.values[second-1]) && at(value) == at(l.values[second+1]) {
				continue
			}
			fmt.Fprintf(b, "%d %d ", left+second, at(value))
		}
		b.WriteString(`"/>` + "\n")
	}
}
