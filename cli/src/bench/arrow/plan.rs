//! What is asked for, and by which ways it comes.

/// Columns of TPC-H's lineitem, in its order.
const COLUMNS: [&str; 16] = [
    "l_orderkey",
    "l_partkey",
    "l_suppkey",
    "l_linenumber",
    "l_quantity",
    "l_extendedprice",
    "l_discount",
    "l_tax",
    "l_returnflag",
    "l_linestatus",
    "l_shipdate",
    "l_commitdate",
    "l_receiptdate",
    "l_shipinstruct",
    "l_shipmode",
    "l_comment",
];

/// Columns that the results of a figure have.
const SELECTED: [usize; 6] = [1, 2, 4, 8, 12, 16];

/// Those of results that are asked for again.
const AGAIN: [usize; 3] = [1, 8, 16];

/// Rows of small results with the query.
const FEW_ROWS: [u64; 2] = [1, 1000];

/// Rows of the size sweep; the whole table comes last.
const ROWS: [u64; 5] = [1, 100, 1000, 10_000, 100_000];

const TYPES: [(&str, &str); 5] = [
    ("int", "l_orderkey, l_partkey, l_suppkey, l_linenumber"),
    ("float", "l_quantity::DOUBLE, l_extendedprice::DOUBLE, l_discount::DOUBLE, l_tax::DOUBLE"),
    ("utf8", "l_shipinstruct, l_shipmode, l_comment"),
    ("nested", "[l_orderkey, l_partkey] AS list, {'a': l_suppkey, 'b': l_shipmode} AS struct"),
    (
        "nulls",
        "CASE WHEN l_linenumber > 1 THEN l_orderkey END AS number, CASE WHEN l_linenumber < 4 THEN l_comment END AS text",
    ),
];

/// One query.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) figure: Figure,
    /// Its place in the figure.
    pub(super) point: Point,
    pub(super) sql: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    /// More and more columns, from the server's memory.
    Transport,
    /// The same, with the query.
    EndToEnd,
    /// More and more rows, from the server's memory.
    Size,
    /// Four or fewer columns of one type, from the server's memory.
    Type,
    /// Columns of a result that the server keeps, and lends again to who may borrow.
    Again,
    /// The same, and the client reads every byte.
    AgainRead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    Columns(usize),
    Rows(u64),
    AllRows,
    Type(&'static str),
}

/// A transport of demo-client, and whether both ends have the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) transport: &'static str,
    pub(super) lz4: bool,
    pub(super) library: bool,
}

pub(super) const fn way(transport: &'static str, lz4: bool, library: bool) -> Way {
    Way { transport, lz4, library }
}

pub(super) const WAYS: [Way; 11] = [
    RPC,
    way("ipc", false, false),
    FLIGHT,
    way("flight", true, false),
    way("scatter", false, false),
    way("rpc", false, true),
    way("ipc", false, true),
    way("flight", false, true),
    way("scatter", false, true),
    way("pull", false, true),
    OURS,
];

/// What the others are compared with.
pub(super) const OURS: Way = way("auto", false, true);
pub(super) const RPC: Way = way("rpc", false, false);
pub(super) const FLIGHT: Way = way("flight", false, false);

impl Way {
    pub(super) fn name(self) -> String {
        let lz4 = if self.lz4 { " lz4" } else { "" };
        let path = if self.library { "Thallus" } else { "TCP" };
        format!("{}{lz4}, {path}", self.transport)
    }
}

impl Figure {
    pub(super) const ALL: [Self; 6] =
        [Self::Transport, Self::EndToEnd, Self::Size, Self::Type, Self::Again, Self::AgainRead];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Transport => "Columns of lineitem, transport alone",
            Self::EndToEnd => "Columns of lineitem, with the query",
            Self::Size => "Rows of lineitem, transport alone",
            Self::Type => "Types, transport alone",
            Self::Again => "Columns of lineitem, asked again of a server that keeps results",
            Self::AgainRead => "The same, and the client reads every byte",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Transport => "alone",
            Self::EndToEnd => "end-to-end",
            Self::Size => "size",
            Self::Type => "type",
            Self::Again => "again",
            Self::AgainRead => "again-read",
        }
    }

    /// What demo-server does with results.
    pub(super) fn server_options(self) -> &'static [&'static str] {
        match self {
            Self::EndToEnd => &[],
            Self::Transport | Self::Size | Self::Type => &["--transport-alone"],
            Self::Again | Self::AgainRead => &["--keep", "4096"],
        }
    }

    pub(super) fn client_options(self) -> &'static [&'static str] {
        if self == Self::AgainRead { &["--read"] } else { &[] }
    }
}

impl std::fmt::Display for Point {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Columns(1) => write!(f, "1 column"),
            Self::Columns(columns) => write!(f, "{columns} columns"),
            Self::Rows(1) => write!(f, "1 row"),
            Self::Rows(rows) => write!(f, "{rows} rows"),
            Self::AllRows => write!(f, "all rows"),
            Self::Type(name) => write!(f, "{name}"),
        }
    }
}

impl Case {
    pub(super) fn name(&self) -> String {
        format!("{}: {}", self.figure.name(), self.point)
    }

    /// Times that a client asks on its connection: the first does not count.
    pub(super) fn repetitions(&self) -> u32 {
        match self.point {
            // The first is where the connection leaves TCP, and the second what is lent again.
            _ if matches!(self.figure, Figure::Again | Figure::AgainRead) => 8,
            Point::Rows(rows) if rows <= 1000 => 60,
            Point::Rows(rows) if rows <= 10_000 => 20,
            _ => 4,
        }
    }
}

/// Those whose names contain any of `only`, or all.
pub(super) fn cases(only: &[String]) -> Vec<Case> {
    let columns = |figure, columns: usize| Case {
        figure,
        point: Point::Columns(columns),
        sql: format!("SELECT {} FROM lineitem", COLUMNS[..columns].join(", ")),
    };
    let rows =
        |figure, rows| Case { figure, point: Point::Rows(rows), sql: format!("FROM lineitem LIMIT {rows}") };
    let transport = SELECTED.map(|selected| columns(Figure::Transport, selected));
    let few = FEW_ROWS.map(|few| rows(Figure::EndToEnd, few));
    let end_to_end = few.into_iter().chain(SELECTED.map(|selected| columns(Figure::EndToEnd, selected)));
    let again = [Figure::Again, Figure::AgainRead]
        .into_iter()
        .flat_map(|figure| AGAIN.map(|selected| columns(figure, selected)));
    let sizes = ROWS.map(|size| rows(Figure::Size, size));
    let all = Case { figure: Figure::Size, point: Point::AllRows, sql: "FROM lineitem".to_owned() };
    let types = TYPES.into_iter().map(|(name, columns)| Case {
        figure: Figure::Type,
        point: Point::Type(name),
        sql: format!("SELECT {columns} FROM lineitem"),
    });
    let wanted = |case: &Case| only.is_empty() || only.iter().any(|text| case.name().contains(text));
    let cases = transport.into_iter().chain(end_to_end).chain(sizes).chain([all]).chain(types).chain(again);
    cases.filter(wanted).collect()
}
