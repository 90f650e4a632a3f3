//! Links kernels with the functions of `library.wgsl` that they use.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use crate::print::writer::Target;

static SOURCE: &str = include_str!("library.wgsl");

/// Library functions by name.
static FUNCTIONS: LazyLock<HashMap<&'static str, &'static str>> = LazyLock::new(|| {
    let mut functions = HashMap::new();
    for text in SOURCE.split("\n\n").map(str::trim) {
        let code = text.lines().position(|l| !l.starts_with("//")).unwrap_or(0);
        let code: usize = text.lines().take(code).map(|l| l.len() + 1).sum();
        let code = &text[code..];
        let name = code.strip_prefix("fn ").and_then(|c| c.split('(').next());
        if let Some(name) = name {
            functions.insert(name, code);
        }
    }
    functions
});

/// Returns the identifiers and other words of a text.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty())
}

/// Suffix of a function that, on devices with 64-bit integers, replaces the function without the suffix.
const INT64: &str = "__int64";

/// The text of a function for a target.
fn function(name: &str, target: Target) -> Option<String> {
    let wide = target.int64.then(|| FUNCTIONS.get(format!("{name}{INT64}").as_str())).flatten();
    match wide {
        Some(code) => Some(code.replacen(INT64, "", 1)),
        None => FUNCTIONS.get(name).map(|code| (*code).to_owned()),
    }
}

/// Prepends the library functions that a text uses, directly or through other library functions.
pub fn link(text: String, target: Target) -> String {
    let mut linked: BTreeMap<String, String> = BTreeMap::new();
    let mut todo: Vec<String> = words(&text).map(str::to_owned).collect();
    while let Some(word) = todo.pop() {
        if linked.contains_key(&word) {
            continue;
        }
        let Some(code) = function(&word, target) else { continue };
        debug_assert!(target.int64 || !words(&code).any(|w| w == "i64"));
        todo.extend(words(&code).map(str::to_owned));
        linked.insert(word, code);
    }
    let mut all: String = linked.into_values().map(|code| code + "\n").collect();
    all += &text;
    all
}
