//! Look-up of a table's rows by the names of operators.
//!
//! A row lists operators without `aten::`, separated by spaces. A name without an overload stands for all overloads; a
//! name that ends with `*` is a prefix. An operator may be in several rows of a table, each of which has some of the
//! columns.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

/// The rows of a table by the names in them.
pub struct ByName<R: 'static> {
    rows: FxHashMap<&'static str, Vec<&'static R>>,
    prefixes: Vec<(&'static str, &'static R)>,
}

impl<R> ByName<R> {
    /// An index of `rows`, whose names `names` returns.
    pub fn new(rows: &'static [R], names: fn(&R) -> &'static str) -> ByName<R> {
        let mut index = ByName { rows: FxHashMap::default(), prefixes: Vec::new() };
        for row in rows {
            for name in names(row).split(' ') {
                match name.strip_suffix('*') {
                    Some(prefix) => index.prefixes.push((prefix, row)),
                    None => index.rows.entry(name).or_default().push(row),
                }
            }
        }
        index
    }

    /// A column's value in the rows with exactly this name.
    pub fn exact<T>(&self, name: &str, column: impl Fn(&R) -> Option<T>) -> Option<T> {
        self.rows.get(short(name))?.iter().find_map(|row| column(row))
    }

    /// A column's value, looked up by the full name, then by the name without overload, then by prefix.
    pub fn find<T>(&self, name: &str, column: impl Fn(&R) -> Option<T> + Copy) -> Option<T> {
        let name = short(name);
        self.exact(name, column).or_else(|| self.exact(base(name), column)).or_else(|| {
            let mut rows = self.prefixes.iter().filter(|(prefix, _)| name.starts_with(prefix));
            rows.find_map(|(_, row)| column(row))
        })
    }

    /// Whether a column is set, by the full name, the name without overload, or a prefix.
    pub fn is(&self, name: &str, column: impl Fn(&R) -> bool + Copy) -> bool {
        self.find(name, |row| column(row).then_some(())).is_some()
    }

    /// The names of the table in alphabetical order, and the columns that are set in the rows of each name. A prefix
    /// ends with `*`. `columns` names a row's columns and says which of them are set.
    pub fn listing<const N: usize>(
        &self,
        columns: fn(&R) -> [(&'static str, bool); N],
    ) -> BTreeMap<String, Vec<&'static str>> {
        let mut all: BTreeMap<String, Vec<&'static str>> = BTreeMap::new();
        let exact =
            self.rows.iter().flat_map(|(name, rows)| rows.iter().map(|row| ((*name).to_owned(), *row)));
        let prefixes = self.prefixes.iter().map(|(prefix, row)| (format!("{prefix}*"), *row));
        for (name, row) in exact.chain(prefixes) {
            let set = columns(row).into_iter().filter(|(_, is_set)| *is_set).map(|(column, _)| column);
            all.entry(name).or_default().extend(set);
        }
        all
    }
}

/// The first name for which two rows set the same column, with the column.
pub fn repeated(listing: &BTreeMap<String, Vec<&'static str>>) -> Option<(String, &'static str)> {
    listing.iter().find_map(|(name, columns)| {
        let twice = columns.iter().enumerate().find(|(i, column)| columns[..*i].contains(column));
        twice.map(|(_, column)| (name.clone(), *column))
    })
}

/// The name without `aten::`.
pub fn short(name: &str) -> &str {
    name.strip_prefix("aten::").unwrap_or(name)
}

/// The name without its overload.
pub fn base(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

/// The name of an operator's family: without namespace, overload, and the underscore of the in-place form. `written`
/// says for each argument of the schema whether the operator writes it.
pub fn functional<'n>(name: &'n str, written: &[bool]) -> &'n str {
    let base = base(short(name));
    let in_place = written.first() == Some(&true) && !base.starts_with("__");
    if in_place { base.strip_suffix('_').unwrap_or(base) } else { base }
}
