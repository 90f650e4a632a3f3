//! Links kernels with the functions of `library.wgsl` that they use.

use std::collections::HashMap;
use std::sync::LazyLock;

use crate::gpu::print::writer::Target;

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

/// Prepends the library functions that a text uses, directly or through other library functions.
pub fn link(text: String, target: Target) -> String {
    let mut linked: Vec<&'static str> = Vec::new();
    let mut todo: Vec<&str> = words(&text).collect();
    let mut added = String::new();
    while let Some(word) = todo.pop() {
        let Some((name, code)) = FUNCTIONS.get_key_value(word) else { continue };
        if linked.contains(name) {
            continue;
        }
        linked.push(name);
        todo.extend(words(code));
    }
    linked.sort_unstable();
    for name in linked {
        let code = FUNCTIONS[name];
        debug_assert!(target.int64 || !words(code).any(|w| w == "i64"));
        added += code;
        added.push('\n');
    }
    added + &text
}
