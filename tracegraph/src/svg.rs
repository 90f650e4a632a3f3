//! A drawing of a symbolic graph: blocks from top to bottom, forward edges on the right, back edges of loops on the
//! left.

use std::fmt::Write;

use crate::ids::BlockId;
use crate::text::{Exit, ListedBlock, Listing};

const LINE: usize = 15;
const GAP: usize = 26;
const MARGIN: usize = 90;
/// Smallest width of a block.
const WIDTH: usize = 620;
/// Width of a character of the 11 px monospace font, in hundredths of a pixel.
const CHARACTER: usize = 662;

const STYLE: &str = "text{font:11px monospace;fill:#222}.title{font-weight:bold}rect{fill:#f6f8fa;stroke:#57606a}\
                     .loop{fill:#fff8e6}path{fill:none;stroke:#57606a}.again{stroke:#b35900}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The lines of text in the box of a block.
fn lines(number: usize, block: &ListedBlock) -> Vec<String> {
    let within = block.within.map_or_else(String::new, |l| format!(" in while l{}", l.0));
    let mut lines = vec![format!("b{number}{within}")];
    lines.extend(block.ops.iter().map(ToString::to_string));
    lines.extend(block.fetched.then(|| "output_fetch".to_owned()));
    lines.push(block.exit.to_string());
    lines
}

/// Draws a listing as SVG. The height depends on the number of lines, the width on the longest one.
pub fn svg(listing: &Listing) -> String {
    let texts: Vec<Vec<String>> = listing.blocks.iter().enumerate().map(|(i, b)| lines(i, b)).collect();
    let mut tops = Vec::with_capacity(texts.len());
    let mut y = GAP + LINE;
    for text in &texts {
        tops.push(y);
        y += text.len() * LINE + 8 + GAP;
    }
    let bottom = |block: usize| tops[block] + texts[block].len() * LINE + 8;
    let mut picture = String::new();
    let longest = texts.iter().flatten().map(|line| line.chars().count()).max().unwrap_or(0);
    let blocks = WIDTH.max((longest * CHARACTER).div_ceil(100) + 16);
    let width = blocks + 2 * MARGIN;
    let _ = writeln!(
        picture,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{y}\" viewBox=\"0 0 {width} {y}\">\n\
         <style>{STYLE}</style>\n<text class=\"title\" x=\"{MARGIN}\" y=\"{LINE}\">start {}</text>",
        escape(&listing.entry.to_string())
    );
    for (i, text) in texts.iter().enumerate() {
        let class = if listing.blocks[i].within.is_some() { " class=\"loop\"" } else { "" };
        let (top, height) = (tops[i], text.len() * LINE + 8);
        let _ = writeln!(
            picture,
            "<rect{class} x=\"{MARGIN}\" y=\"{top}\" width=\"{blocks}\" height=\"{height}\" rx=\"4\"/>"
        );
        for (n, line) in text.iter().enumerate() {
            let title = if n == 0 { " class=\"title\"" } else { "" };
            let (x, baseline) = (MARGIN + 8, top + (n + 1) * LINE);
            let _ = writeln!(picture, "<text{title} x=\"{x}\" y=\"{baseline}\">{}</text>", escape(line));
        }
        draw_exits(&mut picture, i, &listing.blocks[i].exit, &tops, bottom(i), blocks);
    }
    picture + "</svg>\n"
}

fn draw_exits(picture: &mut String, from: usize, exit: &Exit, tops: &[usize], bottom: usize, width: usize) {
    for to in exit.again.iter().chain(&exit.cases) {
        let again = exit.again.contains(to);
        let BlockId(to) = *to;
        let to = to as usize;
        let (y, class) = (tops[to] + LINE / 2, if again { " class=\"again\"" } else { "" });
        let path = if to == from + 1 && !again {
            format!("M{0} {bottom}V{1}", MARGIN + width / 2, tops[to])
        } else {
            // The farther apart the blocks are, the wider the curve. Back edges are on the left.
            let reach = 12 + (MARGIN - 20) * to.abs_diff(from).min(16) / 16;
            let (x, bend) =
                if again { (MARGIN, MARGIN - reach) } else { (MARGIN + width, MARGIN + width + reach) };
            format!("M{x} {}C{bend} {bottom} {bend} {y} {x} {y}", bottom - 6)
        };
        let _ = writeln!(picture, "<path{class} d=\"{path}\"/>");
    }
}
