"""Columns, units and presets from names and values: pure functions over the facts about columns."""

import pyarrow as pa
import pytest

from recpo.log.column_facts import column_facts, length_units, rank_as, unit_of_name
from recpo.log.csv_files import CsvFormat, text_format
from recpo.log.event_kinds import are_kinds, behavior_of, offers, outcome_grades
from recpo.log.recognition import recognize
from recpo.log.schema import ANY, Columns, FlagColumn

SECONDS = [1_700_000_000 + 977 * step for step in range(40)]
BASE = {"user_id": [1, 2, 3, 4] * 10, "item_id": list(range(8)) * 5, "timestamp": SECONDS}


def facts(**columns):
    return [column_facts(name, pa.chunked_array([pa.array(values)])) for name, values in columns.items()]


def spread(low, high, number=40):
    return [low + (high - low) * step // number for step in range(number)]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("play_time_ms", "ms"),
        ("playedMs", "ms"),
        ("track_length_seconds", "s"),
        ("runtimeMinutes", "min"),
        ("timestamp:float", None),
        ("items", None),
        ("ms_per_s", None),
    ],
)
def test_the_unit_that_a_name_says(name, unit):
    assert unit_of_name(name) == unit


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("user_id", ["uid", "userId", "User ID", "user_id:token", "visitorid", "person", "respondent_id"]),
        ("user_id", ["session_id_hash", "Borrower No", "follower_id", "swiper"]),
        ("user_id", ["learner", "candidateId", "profile", "member_no", "playerGuid", "payload.user", "distinct_id"]),
        ("item_id", ["video", "movieId", "product-id", "parent_asin", "gameCode", "payload.article_id", "recipe_code"]),
        ("timestamp", ["shown_ts", "event_ts", "sessionStartMs"]),
        ("propensity", ["show_prob"]),
        ("is_random", ["random_sort"]),
        ("watch_time", ["play_time_ms", "playedMs", "watch_time", "dwellTimeSeconds", "total_listen_time"]),
        ("watch_time", ["play_seconds", "watch_seconds", "listen_seconds", "stream_ms", "time_listened", "view_time"]),
        ("watch_time", ["reading_seconds", "sessionLenSec", "mins_listened"]),
        ("item_id", ["episode", "song_id", "Podcast"]),
        ("duration", ["episode_minutes", "trackLengthMs", "video_duration"]),
        (
            "label",
            ["rating", "Book-Rating", "movie_stars", "percent_watched", "feedback", "Rating (1-5)", "plays", "vote"],
        ),
        ("dislike", ["is_hate", "thumbs_down", "disliked", "hidden"]),
    ],
)
def test_names_in_every_spelling(role, names):
    assert [name for name in names if rank_as(role, name) is None] == []
    assert rank_as(role, "column_1") is None
    assert rank_as("item_id", "episode_minutes") is None
    assert rank_as("label", "average_rating") is rank_as("label", "_%") is None
    assert (behavior_of("is_addToCart"), behavior_of("applied")) == ("cart", "apply")
    assert (behavior_of("click_bool"), behavior_of("has_purchased")) == ("click", "purchase")
    assert (behavior_of("clicked_at"), behavior_of("clicked_at", at=True)) == (None, "click")
    assert rank_as("label", "response_seconds") is None


@pytest.mark.parametrize(
    ("texts", "offered", "grades"),
    [
        (["impression", "click"], ["impression"], {"click": 1.0}),
        (["view", "cart", "purchase"], ["view"], {"cart": 0.5, "purchase": 1.0}),
        (["ad_view", "favorite", "contact_seller"], ["ad_view"], {"favorite": 0.5, "contact_seller": 1.0}),
        (["push_sent", "push_opened", "push_disabled"], ["push_sent", "push_disabled"], {"push_opened": 1.0}),
        (["like", "pass", "superlike", "report"], ["pass", "report"], {"like": 1.0, "superlike": 1.0}),
        (["accepted", "declined"], ["declined"], {"accepted": 1.0}),
        (["view", "add_to_cart", "remove_from_cart"], ["view", "remove_from_cart"], {"add_to_cart": 1.0}),
        (["click", "view"], ["view"], {"click": 1.0}),
        (["seen", "applied"], ["seen"], {"applied": 1.0}),
        (["push_delivered", "push_opened"], ["push_delivered"], {"push_opened": 1.0}),
        (["install", "store_impression", "uninstall"], ["store_impression", "uninstall"], {"install": 1.0}),
        (["attended", "canceled", "no_show"], ["canceled", "no_show"], {"attended": 1.0}),
    ],
)
def test_kinds_of_events_by_their_texts(texts, offered, grades):
    assert list(offers(texts)) == offered
    assert outcome_grades(texts) == grades
    assert are_kinds(texts)
    columns = {"decision": [texts[number % len(texts)] for number in range(40)]}
    found = recognize(facts(**BASE, **columns))
    assert found.columns.label.column == "decision"
    assert set(found.columns.label.values) == set(grades)
    disliked = {text for text in texts if text in ("report", "push_disabled")}
    assert set(getattr(found.columns.dislike, "values", ())) == disliked


def test_unknown_kinds_have_a_grade_only_where_nothing_else_followed():
    assert outcome_grades(["sent", "click", "bounce", "spam_report"]) == {"click": 1.0}
    assert outcome_grades(["impression", "purchase", "app_crash"]) == {"purchase": 1.0}
    assert outcome_grades(["sent", "open", "click"]) == {"open": 0.5, "click": 1.0}
    assert outcome_grades(["impression", "binge"]) == {"binge": 1.0}


def test_texts_that_are_no_kinds_of_events():
    for texts in (
        ["red", "blue"],
        ["like", "dislike"],
        ["view", "blue"],
        ["mobile", "desktop"],
        ["view"],
        ["ordered", "delivered"],
    ):
        assert not are_kinds(texts), texts


def test_of_two_columns_that_may_be_the_item_it_is_the_one_that_differs():
    assert recognize(facts(**BASE, iid=[5] * 40)).columns.item_id == "item_id"
    columns = {"user_id": BASE["user_id"], "timestamp": SECONDS, "item_id": [5] * 40, "song": ["a", "b"] * 20}
    assert recognize(facts(**columns)).columns.item_id == "song"


def test_a_conversion_is_the_label_where_there_are_enough():
    for number, label in ((1_000, "booking_bool"), (999, "click_bool")):
        ones = {"click_bool": 2_000, "booking_bool": number}
        columns = {name: [1] * count + [0] * (3_000 - count) for name, count in ones.items()}
        rows = {name: values * 75 for name, values in BASE.items()}
        assert recognize(facts(**rows, **columns)).columns.label == label


def test_the_score_of_a_model_and_what_does_not_differ_are_no_labels():
    score = {"score": [step / 40 for step in range(40)], "clicked": [0, 1] * 20}
    assert recognize(facts(**BASE, **score)).columns.label == "clicked"
    assert recognize(facts(**BASE, score=score["score"])).columns.label == "score"
    assert recognize(facts(**BASE, rating=[5] * 40)).columns.label is None
    assert recognize(facts(**BASE, points=spread(80, 100))).columns.label == "points"
    assert recognize(facts(**BASE, points=spread(80, 400))).columns.label is None


def test_the_time_of_an_event_is_the_one_that_all_have_or_that_says_when_it_began():
    ids = {name: BASE[name] for name in ("user_id", "item_id")}
    later = [second + 60 if second % 2 else None for second in SECONDS]
    found = recognize(facts(**ids, emailed=SECONDS, clicked_at=later))
    assert found.columns.timestamp == "emailed"
    assert found.columns.label == FlagColumn("clicked_at", ANY)
    both = {"start_hour": SECONDS, "finish_hour": [second + 60 for second in SECONDS]}
    assert recognize(facts(**ids, **both)).columns.timestamp == "start_hour"
    unknown = {"started_on": ["0000-00-00"] * 40, "changed": SECONDS}
    assert recognize(facts(**ids, **unknown)).columns.timestamp == "changed"
    unclear = recognize(facts(**ids, one_hour=SECONDS, other_hour=SECONDS))
    assert any(question.startswith("timestamp") for question in unclear.questions), "not a random order"


@pytest.mark.parametrize("texts", [["4,5", "3,0"], ["73%", "12%"], ["9/10", "7/10"]])
def test_feedback_in_another_form_is_asked_for(texts):
    found = recognize(facts(**BASE, rating=[texts[number % 2] for number in range(40)]))
    assert any("`rating`" in question and "is text" in question for question in found.questions)


@pytest.mark.parametrize(
    ("names", "item"),
    [
        (["username", "spotify_track_uri", "ms_played"], "spotify_track_uri"),
        (["user_id", "widget_id", "category_id"], "widget_id"),
        (["user_id", "widget_id", "gadget_id"], None),
        (["user_id", "session_id", "category_id"], None),
        (["user_id", "anime_id", "widget_id"], "anime_id"),
        (["user_id", "auction_id", "banner"], "banner"),
        (["user_id", "auction_id", "leaflet"], None),
        (["learner", "lesson_slug"], "lesson_slug"),
        (["customer_id", "customer_unique_id"], None),
        (["follower_id", "followee_id"], "followee_id"),
        (["user_id", "brewery_id"], None),
        (["CustomerID", "StockCode", "InvoiceNo"], "StockCode"),
    ],
)
def test_the_only_id_of_something_is_the_item(names, item):
    columns = {name: [f"{name} {number % 7}" for number in range(40)] for name in names}
    assert recognize(facts(**columns, timestamp=SECONDS)).columns.item_id == item


@pytest.mark.parametrize(
    ("names", "keys", "found"),
    [
        (["user_id", "leaflet", "ward"], ["leaflet"], ("user_id", "leaflet")),
        (["human", "item_id", "ward"], ["human"], ("human", "item_id")),
        (["human", "item_id", "ward"], [], (None, "item_id")),
        (["human", "item_id", "ward"], ["human", "ward"], (None, "item_id")),  # which of the two is not told
        (["human", "item_id", "category_id"], ["category_id"], (None, "item_id")),
        (["display_id", "item_id"], ["display_id"], (None, "item_id")),
        (["user_id", "leaflet", "widget_id"], ["leaflet"], ("user_id", "leaflet")),
    ],
)
def test_a_column_with_a_table_of_its_own_is_what_no_name_says(names, keys, found):
    columns = {name: [f"{name} {number % 7}" for number in range(40)] for name in names}
    read = recognize(facts(**columns, timestamp=SECONDS), keys=keys)
    assert (read.column("user_id"), read.column("item_id")) == found


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_clock_has_one_unit(unit):
    factor = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    assert facts(t=[second * factor for second in SECONDS])[0].clock_units == [unit]


@pytest.mark.parametrize(
    ("values", "units"),
    [
        (spread(1, 40), ["s"]),  # 1 to 40 ms is nothing that somebody watches
        (spread(3_000, 90_000), ["ms"]),  # 25 hours
        (spread(1_000, 6_000), ["s", "ms"]),  # an hour, or four seconds
        ([value + 0.5 for value in spread(1_000, 6_000)], ["s"]),
        ([0.0] * 40, []),
    ],
)
def test_units_in_which_watch_times_are_plausible(values, units):
    assert length_units(facts(watch_time=values)[0], "watch_time") == units


def test_the_duration_settles_an_open_watch_time():
    watch, short, long = spread(1_000, 6_000), spread(2_000, 9_000), spread(30, 300)
    open_both = recognize(facts(**BASE, watch_time=watch, duration=short))
    assert [text.partition(":")[0] for text in open_both.questions] == ["watch_time", "duration"]
    assert "pass --columns.watch_time_unit s or --columns.watch_time_unit ms" in open_both.questions[0]
    settled = recognize(facts(**BASE, watch_time=watch, duration_ms=short))
    assert (settled.questions, settled.columns.watch_time_unit) == ((), "ms")
    said = recognize(facts(**BASE, watch_time=watch, duration=short), Columns(watch_time_unit="ms"))
    assert (said.questions, said.columns.duration_unit) == ((), "ms")
    by_values = recognize(facts(**BASE, watch_time=spread(5_000, 200_000), duration=long))
    assert (by_values.columns.watch_time_unit, by_values.columns.duration_unit) == ("ms", "s")


def test_a_name_that_contradicts_the_values_is_a_question():
    found = recognize(facts(**BASE, watch_time_ms=spread(1, 40), duration_s=spread(10, 90)))
    (question,) = found.questions
    assert "watch_time: `watch_time_ms`" in question
    assert "--columns.watch_time_unit s or --columns.watch_time_unit ms" in question


def test_a_time_without_a_clock_is_an_order_and_mixed_units_are_a_question():
    order = recognize(facts(**BASE | {"timestamp": list(range(40))}))
    assert order.columns.time_unit == "order"
    assert "no clock time" in order.doubts[0]
    (question,) = recognize(facts(**BASE | {"timestamp": [*SECONDS[:-1], SECONDS[-1] * 1000]})).questions
    assert "--columns.time_unit" in question


def test_a_log_without_times_has_a_random_order_and_a_time_that_is_not_read_is_a_question():
    timeless = {name: values for name, values in BASE.items() if name != "timestamp"}
    found = recognize(facts(**timeless))
    assert (found.questions, found.columns.time_unit, found.column("timestamp")) == ((), "none", None)
    assert "no column has times" in found.doubts[0]
    (question,) = recognize(facts(**timeless, time=["Friday, 8:55", "Monday, 9:00"] * 20)).questions
    assert "pass --columns.time_unit none" in question
    said = recognize(facts(**BASE), Columns(time_unit="none"))
    assert (said.questions, said.columns.time_unit, said.column("timestamp")) == ((), "none", None)


def test_a_matrix_is_called_one_and_a_log_without_a_user_asks_for_no_time():
    wide = facts(user_id=[1, 2, 3], **{f"item_{number}": [1.0, 2.5, 3.0] for number in range(30)})
    matrix, item = recognize(wide).questions
    assert "30 columns have numbers" in matrix
    assert "melt" in matrix
    assert item.startswith("item_id")
    assert "and 11 more" in item
    wide = facts(
        user_id=[1, 2, 3], timestamp=SECONDS[:3], **{f"cost_{number}": [1.0, 2.5, 3.0] for number in range(30)}
    )
    (item,) = recognize(wide).questions
    assert item.startswith("item_id")
    (user,) = recognize(facts(who=["a", "b"] * 20, item=[1, 2] * 20, rating=[1, 2, 3, 4] * 10)).questions
    assert user.startswith("user_id")


def test_the_only_column_that_is_left_is_the_item():
    ratings = {"person": BASE["user_id"], "sushi": BASE["item_id"], "score": [1, 2, 3, 4] * 10}
    found = recognize(facts(**ratings))
    assert (found.columns.item_id, found.questions) == ("sushi", ())
    for another in (
        {"flavor": BASE["item_id"]},
        {"mood": [0, 1] * 20},
        {"remark": [f"{number}" for number in SECONDS]},
    ):
        (question,) = recognize(facts(**ratings, **another)).questions
        assert question.startswith("item_id: not recognized")
    (question,) = recognize(facts(**{**ratings, "sushi": SECONDS})).questions  # no value recurs
    assert question.startswith("item_id: not recognized")


def test_codes_for_kinds_of_events_are_reported_and_not_read():
    found = recognize(facts(**BASE, action_type=[0, 1, 2, 3] * 10))
    assert found.column("label") is None
    assert any("`action_type` says what kind of event a row is" in doubt for doubt in found.doubts)


def test_what_is_missing_is_asked_for_and_a_clock_is_known_by_its_values():
    found = recognize(facts(who=[1, 2] * 20, item_id=[3, 4] * 20, moment=SECONDS))
    assert (found.column("timestamp"), found.columns.time_unit) == ("moment", "s")
    (question,) = found.questions
    assert question.startswith("user_id: not recognized among the columns who, item_id, moment")
    assert (
        recognize(facts(who=[1, 2] * 20, item_id=[3, 4] * 20, moment=SECONDS), Columns(user_id="who")).questions == ()
    )


def test_values_overrule_names():
    found = recognize(facts(**BASE, dislike=[0, 1, 2, 3] * 10, like=[0, 1] * 20, propensity=[2.0, 0.1] * 20))
    assert found.column("dislike") is None
    assert found.column("propensity") is None
    assert found.columns.label == "like"
    assert any("called like a dislike" in doubt for doubt in found.doubts)


@pytest.mark.parametrize(
    ("lines", "form"),
    [
        (["userId,movieId,rating,timestamp", "1,2,3,4"], CsvFormat(",")),
        (["user;item;ts", "1;2;3"], CsvFormat(";")),
        (["1::1193::5::978300760"], CsvFormat("::", ("userId", "movieId", "rating", "timestamp"))),
        (["196\t242\t3\t881250949"], CsvFormat("\t", ("userId", "movieId", "rating", "timestamp"))),
        (["u1,i2,1700000000"], CsvFormat(",", ("column_1", "column_2", "column_3"))),
        (["user^item^ts", "1^2^3"], CsvFormat("^")),
        (["user\x01item\x01ts", "1\x012\x013"], CsvFormat("\x01")),
        (["1 258 3.5", "1 36 2"], CsvFormat(" ", ("column_1", "column_2", "column_3"))),
    ],
)
def test_how_a_text_file_is_written(lines, form):
    assert text_format(lines, CsvFormat()) == form


def test_named_columns_tell_the_delimiter():
    named = CsvFormat(names=("user", "item", "rating"))
    assert text_format(["1\t258\t3"], named) == CsvFormat("\t", named.names)
    assert text_format(["1,258,3"], named) == CsvFormat(",", named.names)
    assert text_format(["1;258"], named) == CsvFormat(",", named.names)  # no delimiter gives three


def test_other_readings_of_columns_are_reported():
    episodes = facts(**BASE, show=["a", "b"] * 20, podcast=["c", "d"] * 20, minutes=[5, 6] * 20, muted=[0, 1] * 20)
    found = recognize([*episodes, *facts(listened_seconds=spread(30, 300))])
    assert found.questions == ()
    item, duration, dislike = found.doubts
    assert item == "`item_id` is the item; if it is `podcast`, pass --columns.item_id NAME"
    assert "if it is `minutes`, pass --columns.duration NAME" in duration
    assert "if `muted` says one, pass --columns.dislike NAME" in dislike


def test_minutes_are_reported_only_if_they_are_not_plausible():
    plausible = recognize(facts(**BASE, listened_seconds=spread(30, 300), item_minutes=spread(5, 90)))
    assert (plausible.column("duration"), plausible.columns.duration_unit) == ("item_minutes", "min")
    assert plausible.doubts == ()
    long = recognize(facts(**BASE, listened_seconds=spread(30, 300), item_minutes=spread(500, 9_000)))
    assert "not plausible: median" in long.doubts[0]


_BOUGHT, _KEPT = {"addtocart": 0.5, "transaction": 1.0}, {"cart": 0.5, "purchase": 1.0}


@pytest.mark.parametrize(
    ("columns", "label", "behaviors"),
    [
        ({"like": [0, 0, 1, 0] * 10, "clicked": [0, 1] * 20}, "clicked", {"like": "like"}),
        ({"share": [0, 1] * 20, "bought": [True] * 40}, "share", {"purchase": "bought"}),
        ({"liked": [0, 1] * 20, "finished": [True, False] * 20}, "finished", {"like": "liked"}),
        ({"liked": ["yes", "no"] * 20}, FlagColumn("liked", "yes"), {}),
        ({"was_helpful": ["yes", "no", None, None] * 10}, FlagColumn("was_helpful", "yes"), {}),
        ({"skipped": [0, 1] * 20}, FlagColumn("skipped", ("0", "false", "False", "FALSE")), {}),
        ({"skipped": [True, False] * 20, "saved": [0, 1] * 20}, "saved", {}),
        ({"event": ["Impression", "click"] * 20}, FlagColumn("event", "click"), {}),
        ({"action": ["shown", "buy", "like", "shown"] * 10}, FlagColumn("action", {"buy": 1.0, "like": 0.5}), {}),
        ({"event": ["view", "cart"] * 20}, FlagColumn("event", "cart"), {}),
        ({"event": ["view", "addtocart", "transaction", "view"] * 10}, FlagColumn("event", _BOUGHT), {}),
        ({"event_type": ["view", "cart", "remove_from_cart", "purchase"] * 10}, FlagColumn("event_type", _KEPT), {}),
        ({"event": ["pv", "fav", "cart", "buy"] * 10}, FlagColumn("event", {"buy": 1.0, "cart": 0.5, "fav": 0.5}), {}),
        (
            {"event": ["impression", "view", "purchase", "view"] * 10},
            FlagColumn("event", {"purchase": 1.0, "view": 0.5}),
            {},
        ),
        (
            {"event": ["clicks", "carts", "orders", "clicks"] * 10},
            FlagColumn("event", {"carts": 0.5, "orders": 1.0}),
            {},
        ),
        ({"event": ["click", "share"] * 20}, FlagColumn("event", "share"), {}),
        ({"event": ["impression", "purchase"] * 20}, FlagColumn("event", "purchase"), {}),
        ({"event": ["click"] * 40}, None, {}),
        ({"event": ["view", "scroll"] * 20}, None, {}),
        ({"click": [0, 1] * 20, "stars": [1, 5, 3, 2] * 10}, "stars", {"click": "click"}),
        ({"click": [0, 1] * 20, "watch_s": spread(30, 300)}, None, {"click": "click"}),
        ({"click": [1] * 40}, None, {"click": "click"}),
    ],
)
def test_without_watch_times_and_ratings_a_behavior_is_the_label(columns, label, behaviors):
    found = recognize(facts(**BASE, **columns))
    assert (found.columns.label, dict(found.behaviors)) == (label, behaviors)
    is_read = label is not None and label != "stars"
    assert found.outcome_rows == (is_read and bool({"event", "event_type", "action", "behavior_type"} & columns.keys()))
    assert any("remove it from prepare.yaml and choose label EveryEvent" in one for one in found.doubts) == is_read


def test_kinds_that_the_user_grades_have_rows_of_their_own_too():
    kinds = facts(**BASE, action_type=[0, 1, 2, 2] * 10)
    found = recognize(kinds, Columns(label=FlagColumn("action_type", {1: 0.5, 2: 1.0})))
    assert (found.questions, found.outcome_rows) == ((), True)
    assert not recognize(kinds, Columns(label="action_type")).outcome_rows


def test_a_flag_with_one_value_and_nulls_is_named():
    found = recognize(facts(**BASE, like=[1, None] * 20))
    assert found.column("label") is None
    assert any("where a missing value means no like, write 0" in doubt for doubt in found.doubts)


def test_without_any_feedback_the_cost_and_the_other_numbers_are_named():
    found = recognize(facts(**BASE, volume=spread(0, 100), city=["a", "b"] * 20))
    (doubt,) = found.doubts
    assert "every event has the same label" in doubt
    assert "`volume` (0 to 97; 40 distinct)" in doubt
    assert "city" not in doubt
    (doubt,) = recognize(facts(**BASE, direction=["left", "right"] * 20)).doubts
    assert "others: `direction` (left, right; 2 distinct)" in doubt
    assert recognize(facts(**BASE, hated=[0, 1] * 20)).doubts == ()
    (doubt,) = recognize(facts(**BASE, case_no=spread(0, 100), volume=spread(0, 9), status=["new", "lost"] * 20)).doubts
    assert "others: `status` (lost, new; 2 distinct), `volume`" in doubt or "others: `status` (new, lost" in doubt
    assert "case_no" not in doubt


@pytest.mark.parametrize(
    ("name", "texts", "dislikes", "likes"),
    [
        ("thumb", ["up", "down"], "down", "up"),
        ("answer", ["Dislike", "like", "none"], "Dislike", "like"),
        ("sentiment", ["positive", "negative", "neutral"], "negative", "positive"),
        ("emoji", ["👍🏽", "👎"], "👎", "👍🏽"),
        ("reaction", ["thumbs_down", "not interested"], ("not interested", "thumbs_down"), None),
    ],
)
def test_opinions_as_texts(name, texts, dislikes, likes):
    rated = facts(**BASE, **{name: (texts * 40)[:40]})
    found = recognize(rated).columns
    assert found.dislike == FlagColumn(name, dislikes)
    assert found.label == (None if likes is None else FlagColumn(name, likes))
    beside = recognize([*rated, *facts(watch_seconds=spread(30, 300))])
    assert beside.columns.label is None
    assert dict(beside.behaviors) == ({} if likes is None else {"like": FlagColumn(name, likes)})


def test_words_that_may_be_opinions_are_reported_and_not_read():
    for column in ({"scroll": ["up", "down"] * 20}, {"thumb": ["up", "down", "sideways", "up"] * 10}):
        found = recognize(facts(**BASE, **column))
        assert (found.column("dislike"), found.column("label")) == (None, None)
        assert any("could be feedback" in doubt and "equals: VALUE" in doubt for doubt in found.doubts)


def test_flags_as_texts():
    found = recognize(facts(**BASE, disliked=["yes", "no"] * 20, saved=["T", "F"] * 20, watch_s=spread(30, 300)))
    assert found.columns.dislike == FlagColumn("disliked", "yes")
    assert dict(found.behaviors) == {"save": FlagColumn("saved", "T")}


def test_a_named_column_with_other_values_is_a_question():
    found = recognize(facts(**BASE, title=["a", "b"] * 20), Columns(watch_time="title"))
    (question,) = found.questions
    assert "watch_time: `title` (a, b; 2 distinct) has other values" in question


def test_a_rating_of_few_events_is_no_label_where_most_events_have_another():
    rating, share = [5, None, None, 3, None] * 8, [0.1, 0.9, 0.5, 1.0] * 10
    found = recognize(facts(**BASE, rating=rating, completion=share))
    assert found.column("label") == "completion"
    assert any("if it is `rating`, pass --columns.label NAME" in doubt for doubt in found.doubts)
    assert recognize(facts(**BASE, rating=[5, 4, None, 3] * 10, completion=share)).column("label") == "rating"
    assert recognize(facts(**BASE, rating=rating, completion=[0.1, None] * 20)).column("label") == "rating"
    assert recognize(facts(**BASE, rating=rating, relevance=share)).column("label") == "rating"  # what a model said
    given = recognize(facts(**BASE, rating=rating, completion=share), Columns(label="rating"))
    assert given.column("label") == "rating"


def test_a_rating_of_few_events_is_no_label_where_a_flag_says_how_good_every_event_was():
    stars, done = [5, None, None, 3, None] * 8, [1, 0, 0, 1] * 10
    found = recognize(facts(**BASE, stars=stars, completed=done))
    assert found.column("label") == "completed"
    assert any("--columns.label stars" in doubt for doubt in found.doubts)
    assert recognize(facts(**BASE, stars=stars)).column("label") == "stars"
    assert recognize(facts(**BASE, stars=stars, completed=[1, None] * 20)).column("label") == "stars"
    assert recognize(facts(**BASE, stars=[5, 4, None, 3] * 10, completed=done)).column("label") == "stars"
    given = recognize(facts(**BASE, stars=stars, completed=done), Columns(label="stars"))
    assert given.column("label") == "stars"
