//! Tiling of contractions: the division of a matrix product among workgroups and threads.

/// Cooperative matrices of a device, with factors of 16 bits and sums of 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Matrices {
    /// Number of rows and columns, 8 or 16.
    pub size: u32,
    /// Number of threads of a subgroup.
    pub subgroup: u32,
    /// Whether factors may be bfloat16, not only f16.
    pub bfloat16: bool,
}

/// Sizes of the part of the result that a workgroup and each of its threads compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// Rows per workgroup.
    pub m: u32,
    /// Columns per workgroup.
    pub n: u32,
    /// Length of `k` per step.
    pub k: u32,
    /// Rows per thread.
    pub thread_m: u32,
    /// Columns per thread.
    pub thread_n: u32,
}

impl Tile {
    /// Tile for large results of halves, which cooperative matrices compute where the device has them.
    pub const LARGE: Tile = Tile { m: 128, n: 128, k: 16, thread_m: 8, thread_n: 8 };
    /// Tile for large results.
    pub const WIDE: Tile = Tile { m: 64, n: 128, k: 16, thread_m: 8, thread_n: 8 };
    /// Tile for results that would have few large tiles.
    pub const MEDIUM: Tile = Tile { m: 64, n: 64, k: 16, thread_m: 4, thread_n: 8 };
    /// Tile for results of few rows.
    pub const THIN: Tile = Tile { m: 16, n: 64, k: 32, thread_m: 4, thread_n: 4 };

    /// Threads per workgroup.
    pub fn threads(self) -> u32 {
        (self.m / self.thread_m) * (self.n / self.thread_n)
    }
}

/// `size / of`, rounded up.
pub fn ceil_div(size: i64, of: i64) -> i64 {
    (size + of - 1) / of
}

/// Sizes of a contraction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Number of independent products.
    pub batch: i64,
    /// Rows of the result.
    pub m: i64,
    /// Columns of the result.
    pub n: i64,
    /// Length of the reduced dimension.
    pub k: i64,
}

/// The division of a contraction among workgroups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tiling {
    /// Tile of each workgroup.
    pub tile: Tile,
    /// Number of parts that `k` is split into. Another kernel adds up their results.
    pub parts: i64,
    /// Length of a part of `k`.
    pub share: i64,
}

impl Tiling {
    /// The tiling for these sizes, of factors that are `halves` or not. It depends on these alone, so equal calls return
    /// equal bits.
    ///
    /// | result                              | tile                   |
    /// |-------------------------------------|------------------------|
    /// | at most 16 rows                     | 16 x 64, 64 threads    |
    /// | halves, at least 96 tiles of 128    | 128 x 128, 256 threads |
    /// | others, at least 192 tiles          | 64 x 128, 128 threads  |
    /// | few tiles                           | 64 x 64, 128 threads   |
    ///
    /// If that makes fewer than 128 workgroups, `k` is split into parts of at least 256. The tiles are the fastest ones
    /// of a sweep on an H200 (docs/gpu.md).
    pub fn of(e: Extent, halves: bool) -> Tiling {
        let groups = |t: Tile| {
            let along = |size: i64, tile: u32| ceil_div(size, i64::from(tile)).max(1);
            e.batch.max(1) * along(e.m, t.m) * along(e.n, t.n)
        };
        let (large, least) = if halves { (Tile::LARGE, 96) } else { (Tile::WIDE, 192) };
        let tile = match e.m {
            ..=16 => Tile::THIN,
            _ if groups(large) < least => Tile::MEDIUM,
            _ => large,
        };
        let wanted = (256 / groups(tile)).min(e.k / 256).clamp(1, 64);
        let wanted = if groups(tile) < 128 { wanted } else { 1 };
        let step = i64::from(tile.k);
        let share = ceil_div(ceil_div(e.k.max(1), wanted), step) * step;
        Tiling { tile, parts: ceil_div(e.k.max(1), share), share }
    }
}

impl Tiling {
    /// The tiling with `k` split into as many parts as possible, at most `most`. `None` if it cannot be split.
    pub fn divided(self, k: i64, most: i64) -> Option<Tiling> {
        let step = i64::from(self.tile.k);
        let share = ceil_div(ceil_div(k, most), step) * step;
        (k > share).then(|| Tiling { parts: ceil_div(k, share), share, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_is_split_where_there_are_few_tiles() {
        let e = Extent { batch: 1, m: 64, n: 64, k: 100_000 };
        let tiling = Tiling::of(e, false);
        assert_eq!((tiling.tile, tiling.parts), (Tile::MEDIUM, 64));
        assert!(tiling.share * tiling.parts >= e.k && tiling.share * (tiling.parts - 1) < e.k);
        assert_eq!(Tiling::of(Extent { m: 5000, n: 5000, ..e }, false).parts, 1);
        assert_eq!(Tiling::of(Extent { m: 4, ..e }, true).tile, Tile::THIN);
    }
}
