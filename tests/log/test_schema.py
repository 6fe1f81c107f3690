from recpo.log.schema import EVENT_SCHEMA, PRESETS, Columns, LogColumns
from tests.refusals import refused


def test_what_the_user_says_stands_over_the_preset():
    mapping = Columns(item_id="photo", time_unit="s").over(PRESETS["kuairand"])
    assert (mapping.item_id, mapping.time_unit) == ("photo", "s")
    assert (mapping.user_id, mapping.watch_time, mapping.watch_time_unit) == ("user_id", "play_time_ms", "ms")


def test_presets_name_the_keys_and_every_unit():
    for preset in PRESETS.values():
        assert set(LogColumns.REQUIRED) <= set(preset.named())
        assert None not in (preset.time_unit, preset.watch_time_unit, preset.duration_unit)


def test_a_mapping_names_only_what_it_was_told():
    assert Columns(timestamp="pos").named() == {"timestamp": "pos"}


def test_columns_have_names():
    with refused("wrong_type", "columns.label") as caught:
        Columns(label=3)
    assert "give the columns of the frame names" in str(caught.value)


def test_prepared_rows_are_fixed_width():
    assert all(field.type.bit_width <= 64 for field in EVENT_SCHEMA)
