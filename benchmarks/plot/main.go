// SPDX-License-Identifier: Apache-2.0

// Command plot draws what the worker shedder does in an incident of ten minutes,
// by the code that runs in production:
//
//	go run ./plot -o ../docs/workers.svg
package main

import (
	"bytes"
	"flag"
	"fmt"
	"image/color"
	"log"
	"math"
	"os"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/stripe-ratelimit/caddy-stripe-ratelimit/shedding"
)

func main() {
	out := flag.String("o", "workers.svg", "the file to write")
	flag.Parse()
	svg, err := drawIncident(simulate())
	if err == nil {
		err = os.WriteFile(*out, svg, 0o644)
	}
	if err != nil {
		log.Fatal(err)
	}
}

var (
	gray   = color.Gray{Y: 0x99}
	dark   = color.Gray{Y: 0x33}
	band   = color.RGBA{R: 0xe8, G: 0xf2, B: 0xe8, A: 0xff}
	colors = map[shedding.Criticality]color.Color{ // told apart by the color-blind, too
		shedding.TestMode: color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff},
		shedding.Get:      color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff},
		shedding.Post:     color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff},
		shedding.Critical: dark,
	}
)

// drawIncident returns an SVG of three panels above each other: utilization,
// level, shed shares.
func drawIncident(seconds []second) ([]byte, error) {
	plot.DefaultFont.Variant = "Sans"
	utilization := newPanel("utilization", 0, 2.6, ticks(percent, 0, 0.4, 0.8, 1.2, 1.6, 2, 2.5))
	utilization.Title.Text = "The worker shedder in five minutes of overload, and after"
	ramp := shedding.DefaultRamp()
	between, err := plotter.NewPolygon(plotter.XYs{{X: 0, Y: ramp.Good}, {X: 10, Y: ramp.Good}, {X: 10, Y: ramp.Bad}, {X: 0, Y: ramp.Bad}})
	if err != nil {
		return nil, err
	}
	between.Color, between.LineStyle.Width = band, 0
	utilization.Add(between)
	utilization.Legend.Add("70 to 80 %: the level stands still", between)

	level := newPanel("level", -0.3, 1.05, ticks(decimal, float64(ramp.Rest()), 0, 1./3, 2./3, 1))
	shares := newPanel("shed share of class", 0, 1.05, ticks(percent, 0, 0.25, 0.5, 0.75, 1))
	shares.X.Label.Text = "minutes"

	add := func(p *plot.Plot, name string, c color.Color, dashed bool, value func(second) float64) {
		l, err2 := plotter.NewLine(bends(seconds, value))
		if err2 != nil {
			err = err2
			return
		}
		l.Color, l.Width = c, vg.Points(1.5)
		if dashed {
			l.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
		}
		p.Add(l)
		if name != "" {
			p.Legend.Add(name, l)
		}
	}
	add(utilization, "offered by clients", gray, true, func(s second) float64 { return s.offered })
	add(utilization, "let in", dark, false, func(s second) float64 { return s.utilization })
	add(level, "", dark, false, func(s second) float64 { return float64(s.level) })
	for _, class := range classes {
		add(shares, class.String(), colors[class], false, func(s second) float64 { return s.shed[class] })
	}
	if err != nil {
		return nil, err
	}

	canvas := vgsvg.New(19*vg.Centimeter, 18*vg.Centimeter)
	panels := [][]*plot.Plot{{utilization}, {level}, {shares}}
	tiles := draw.Tiles{Rows: 3, Cols: 1, PadLeft: 2 * vg.Millimeter, PadTop: 2 * vg.Millimeter, PadRight: 4 * vg.Millimeter, PadY: 5 * vg.Millimeter}
	page := draw.New(canvas)
	page.FillPolygon(color.White, []vg.Point{page.Min, {X: page.Max.X, Y: page.Min.Y}, page.Max, {X: page.Min.X, Y: page.Max.Y}})
	for i, row := range plot.Align(panels, tiles, page) {
		panels[i][0].Draw(row[0])
	}
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, err
	}
	// The letters of Arial are as wide, and it is where Liberation is not.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif")), nil
}

// bends returns the points in which a line does not go straight on.
func bends(seconds []second, value func(second) float64) (points plotter.XYs) {
	for i, s := range seconds {
		if i > 0 && i+1 < len(seconds) && math.Abs(value(seconds[i-1])-2*value(s)+value(seconds[i+1])) < 1e-9 {
			continue
		}
		points = append(points, plotter.XY{X: s.at.Minutes(), Y: value(s)})
	}
	return points
}

// newPanel returns an empty plot over ten minutes.
func newPanel(name string, low, high float64, y plot.ConstantTicks) *plot.Plot {
	p := plot.New()
	p.Title.TextStyle.Font.Size, p.Title.Padding = 13, 2*vg.Millimeter
	p.Legend.TextStyle.Font.Size = 10
	p.Y.Label.Text, p.Y.Min, p.Y.Max, p.Y.Tick.Marker = name, low, high, y
	p.X.Min, p.X.Max = 0, 10
	p.X.Tick.Marker = minutes()
	p.Legend.Top = true
	p.Legend.Padding = vg.Millimeter
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = color.Gray{Y: 0xdd}, color.Gray{Y: 0xee}
	p.Add(grid)
	return p
}

func minutes() (t plot.ConstantTicks) {
	for minute := range 11 {
		at := time.Duration(minute) * time.Minute
		t = append(t, plot.Tick{Value: at.Minutes(), Label: fmt.Sprint(minute)})
	}
	return t
}

func ticks(label func(float64) string, values ...float64) (t plot.ConstantTicks) {
	for _, v := range values {
		t = append(t, plot.Tick{Value: v, Label: label(v)})
	}
	return t
}

func percent(v float64) string { return fmt.Sprintf("%.0f %%", 100*v) }
func decimal(v float64) string { return fmt.Sprintf("%.2f", v) }
