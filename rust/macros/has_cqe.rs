// SPDX-License-Identifier: GPL-2.0

//! `#[derive(HasCqe)]`.
//!
//! It parses the compiler's token streams itself, as out-of-tree modules cannot use the kernel's
//! `syn`.

use proc_macro::{
    Delimiter,
    Group,
    Ident,
    Spacing,
    Span,
    TokenStream,
    TokenTree, //
};

pub(crate) fn derive(input: TokenStream) -> TokenStream {
    let is_item = |word: &str| ["struct", "enum", "union"].contains(&word);
    let mut tokens = input
        .into_iter()
        .skip_while(|token| !matches!(token, TokenTree::Ident(w) if is_item(&w.to_string())));
    let (Some(item), Some(TokenTree::Ident(name))) = (tokens.next(), tokens.next()) else {
        return error(Span::call_site(), "HasCqe: not a struct");
    };
    if item.to_string() != "struct" {
        return error(item.span(), "HasCqe: only a struct can embed a Cqe");
    }

    let mut rest: Vec<TokenTree> = tokens.collect();
    let fields = match rest.pop() {
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => group.stream(),
        _ => return error(name.span(), "HasCqe: the struct needs named fields"),
    };
    let [declared, used, bounds] = parse_generics(&rest);

    // This expands to safe code only, as its paths may not be those of the crate `rdma`: a ULP may
    // give the name to another crate. The proof is in `rdma::cqe_field!`.
    let fields = split(&fields.into_iter().collect::<Vec<_>>());
    let fields = fields.iter().filter_map(|field| parse_field(field));
    let output: TokenStream = fields
        .flat_map(|(field, id)| {
            at(
                field.span(),
                &format!(
                    "#[automatically_derived]
                    impl<{declared}> ::rdma::cqe::HasCqe<{id}> for {name}<{used}> {bounds} {{
                        const FIELD: ::rdma::cqe::Field<Self, {id}> = ::rdma::cqe_field!({field});
                    }}"
                ),
            )
        })
        .collect();
    if output.is_empty() {
        return error(name.span(), "HasCqe: no field of type Cqe<Self>");
    }
    output
}

/// Reports an error at a place in the user's code.
fn error(span: Span, message: &str) -> TokenStream {
    at(span, &format!("::core::compile_error!({message:?});"))
}

/// The depth of angle brackets. The `>` of an arrow closes none.
#[derive(Default)]
struct Angles {
    depth: usize,
    arrow: bool,
}

impl Angles {
    /// Returns the depth behind the next token.
    fn after(&mut self, token: &TokenTree) -> usize {
        let arrow = core::mem::take(&mut self.arrow);
        if let TokenTree::Punct(punct) = token {
            match punct.as_char() {
                '<' => self.depth += 1,
                '>' if !arrow => self.depth = self.depth.saturating_sub(1),
                '-' => self.arrow = punct.spacing() == Spacing::Joint,
                _ => {}
            }
        }
        self.depth
    }
}

/// Returns the position of the first such token that is not inside of angle brackets.
fn find(tokens: &[TokenTree], c: char) -> Option<usize> {
    let mut angles = Angles::default();
    tokens
        .iter()
        .position(|token| angles.after(token) == 0 && is_punct(Some(token), c))
}

/// Splits at the commas that are not inside of angle brackets.
fn split(tokens: &[TokenTree]) -> Vec<Vec<TokenTree>> {
    let mut parts = Vec::new();
    let mut rest = tokens;
    while let Some(comma) = find(rest, ',') {
        parts.push(rest[..comma].to_vec());
        rest = &rest[comma + 1..];
    }
    parts.push(rest.to_vec());
    parts.retain(|part| !part.is_empty());
    parts
}

fn is_punct(token: Option<&TokenTree>, c: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == c)
}

fn text(tokens: &[TokenTree]) -> String {
    tokens.iter().cloned().collect::<TokenStream>().to_string()
}

/// Parses the tokens between the struct's name and its fields. Returns what goes where in
/// `impl<declared> Trait for Name<used> bounds`.
fn parse_generics(tokens: &[TokenTree]) -> [String; 3] {
    let mut all = String::new();
    let mut used = String::new();
    let mut rest = tokens;
    if is_punct(tokens.first(), '<') {
        // The first `>` outside of angle brackets is the one that closes the list.
        let end = find(tokens, '>').unwrap_or(tokens.len() - 1);
        for param in split(&tokens[1..end]) {
            let default = find(&param, '=');
            let declared = &param[..default.unwrap_or(param.len())];
            all += &format!("{}, ", text(declared));
            let bounds = declared.iter().position(|token| is_punct(Some(token), ':'));
            let mut name = &declared[..bounds.unwrap_or(declared.len())];
            if matches!(name.first(), Some(TokenTree::Ident(word)) if word.to_string() == "const") {
                name = &name[1..];
            }
            used += &format!("{}, ", text(name));
        }
        rest = &tokens[end + 1..];
    }
    [all, used, text(rest)]
}

/// Parses `attributes visibility name: path::Cqe<owner, ID>`. Returns the name and the id, or
/// `None` for any other field.
fn parse_field(tokens: &[TokenTree]) -> Option<(Ident, String)> {
    let colon = tokens.iter().position(|token| {
        matches!(token, TokenTree::Punct(p) if p.as_char() == ':' && p.spacing() == Spacing::Alone)
    })?;
    let TokenTree::Ident(name) = tokens.get(colon.checked_sub(1)?)? else {
        return None;
    };
    let ty = &tokens[colon + 1..];
    let open = ty.iter().position(|token| is_punct(Some(token), '<'))?;
    match ty.get(open.checked_sub(1)?)? {
        TokenTree::Ident(word) if word.to_string() == "Cqe" => {}
        _ => return None,
    }
    let args = split(ty.get(open + 1..ty.len() - 1)?);
    let id = args.get(1).map_or("0".to_string(), |id| text(id));
    Some((name.clone(), id))
}

/// Parses `source` into tokens at `span`, where the compiler reports errors.
fn at(span: Span, source: &str) -> TokenStream {
    fn place(tokens: TokenStream, span: Span) -> TokenStream {
        tokens
            .into_iter()
            .map(|mut token| {
                if let TokenTree::Group(group) = &token {
                    token = Group::new(group.delimiter(), place(group.stream(), span)).into();
                }
                token.set_span(span.resolved_at(Span::mixed_site()));
                token
            })
            .collect()
    }

    match source.parse() {
        Ok(tokens) => place(tokens, span),
        Err(_) => error(span, "HasCqe: this type is beyond the macro"),
    }
}
